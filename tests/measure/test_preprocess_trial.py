from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from PIL import Image

from edgeq.cli import group
from edgeq.data.samples import open_samples
from edgeq.errors import DataError, UsageError
from edgeq.measure.evaluation import PLAIN, EvalRequest, propose, try_preprocess
from edgeq.model.load import model_signature
from tests.graphs import proto

SIZE = 4


@pytest.fixture
def eval_request(tmp_path: Path) -> EvalRequest:
    """A model that tells red from blue by thresholds that only 0..255 minus the mean colour, BGR, meets."""
    weights = np.float32([[[[1]], [[0]], [[-1]]], [[[-1]], [[0]], [[1]]]])
    bias = np.float32([-(123.68 - 103.939), 123.68 - 103.939])
    body = f"""g (float[N, 3, {SIZE}, {SIZE}] x) => (float[N, 2] z) {{
        c = Conv(x, w, b)
        y = GlobalMaxPool(c)
        z = Flatten(y)
    }}"""
    onnx.save(proto(body, {"w": weights, "b": bias}), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 40)
    images = np.full((40, SIZE, SIZE, 3), 100, np.uint8)
    images[..., 0] += (10 * labels).astype(np.uint8)[:, None, None]  # more red: class 1
    images[..., 2] += (10 * (1 - labels)).astype(np.uint8)[:, None, None]
    np.savez(tmp_path / "d.npz", X=images, Y=labels)
    source = "key=X,label=Y,source.layout=HWC,layout=model"
    return EvalRequest(tmp_path / "m.onnx", tmp_path / "d.npz", task="classification", preprocess=source)


def test_the_right_preprocessing_comes_first(eval_request: EvalRequest) -> None:
    trial = try_preprocess(eval_request)
    found = {one.preprocess: one for one in trial.tries}
    assert trial.tries[0].accuracy is not None
    assert trial.tries[0].accuracy.value == 1.0
    assert "caffe2" in trial.tied
    assert found["caffe2"].accuracy is not None
    assert found["tf"].accuracy is not None
    assert found["tf"].accuracy.value < 0.7
    assert found["imagenet"].accuracy is None or found["imagenet"].accuracy.value < 0.7
    assert set(PLAIN) <= set(found)


def test_a_candidate_that_does_not_fit_says_why(eval_request: EvalRequest) -> None:
    trial = try_preprocess(eval_request, ["crop=64,layout=model", "caffe2"])
    assert [one.preprocess for one in trial.tries][-1] == "crop=64,layout=model"
    assert "smaller than the crop" in str(trial.tries[-1].reason)


def test_what_cannot_be_tried_is_refused(eval_request: EvalRequest) -> None:
    model, data = eval_request.model, eval_request.data
    with pytest.raises(UsageError, match="accuracy"):
        try_preprocess(EvalRequest(model, data))
    with pytest.raises(UsageError, match="one model"):
        try_preprocess(EvalRequest(model, data, task="classification", reference=model))
    with pytest.raises(DataError):
        try_preprocess(EvalRequest(model, data, task="classification"), ["crop=64"])


def test_the_command(eval_request: EvalRequest) -> None:
    given = ["eval", str(eval_request.model), "--data", str(eval_request.data), "--task", "classification"]
    given += ["--preprocess", eval_request.preprocess, "--try-preprocess"]
    report = json.loads(CliRunner().invoke(group, [*given, "--json"]).stdout)
    assert report["count"] == 40
    assert report["best"] in report["tied"]
    assert {"preprocess", "title", "metrics", "reason"} == set(report["candidates"][0])
    human = CliRunner().invoke(group, given)
    assert human.exit_code == 0
    assert "caffe2" in human.output


def test_grey_models_are_proposed_what_fits(tmp_path: Path) -> None:
    body = f"""g (float[N, 1, {SIZE}, {SIZE}] x) => (float[N, 2] y) <float[1, 2] w = {{1, -1}}> {{
        p = GlobalAveragePool(x)
        f = Flatten(p)
        y = MatMul(f, w)
    }}"""
    onnx.save(proto(body), tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    for number in range(3):
        pixels = np.full((5, 7, 3), 80 * number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    proposed = re.search("Type --preprocess (\\S+) if", propose(tmp_path / "m.onnx", tmp_path / "images"))
    assert proposed is not None
    assert proposed[1].startswith("channels=L,")
    samples = open_samples(tmp_path / "images", model_signature(tmp_path / "m.onnx"), preprocess=proposed[1])
    assert [sample.inputs["x"].shape for sample in samples] == [(1, 1, SIZE, SIZE)] * 3
