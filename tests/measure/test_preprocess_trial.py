from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from PIL import Image

from edgeq.cli import group
from edgeq.data.labels import Labels
from edgeq.data.open_source import Data
from edgeq.data.preprocess import candidates, choices, names
from edgeq.data.samples import SourceSamples, open_samples
from edgeq.errors import DataError, UsageError
from edgeq.measure.evaluation import EvalRequest
from edgeq.measure.preprocess_search import BITS, open_or_search, search
from edgeq.measure.preprocess_trial import PLAIN, try_preprocess
from edgeq.model.load import model_signature
from edgeq.run.session import open_session
from edgeq.util.display import Silent
from tests.graphs import proto

SIZE = 4


@pytest.fixture
def eval_request(tmp_path: Path) -> EvalRequest:
    """Return a request for a model that tells red from blue only in BGR values of 0 to 255 minus the mean colour."""
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
    images[..., 0] += (10 * labels).astype(np.uint8)[:, None, None]  # class 1 has more red
    images[..., 2] += (10 * (1 - labels)).astype(np.uint8)[:, None, None]
    np.savez(tmp_path / "d.npz", X=images, Y=labels)
    source = "key=X,label=Y,source.layout=HWC,layout=model"
    return EvalRequest(tmp_path / "m.onnx", tmp_path / "d.npz", task="classification", preprocess=source)


def test_the_right_preprocessing_comes_first(eval_request: EvalRequest) -> None:
    trial = try_preprocess(eval_request)
    trials = {attempt.preprocess: attempt for attempt in trial.tries}
    assert trial.tries[0].accuracy is not None
    assert trial.tries[0].accuracy.value == 1.0
    assert "bgr-mean" in trial.tied
    assert trials["bgr-mean"].accuracy is not None
    assert trials["tf"].accuracy is not None
    assert trials["tf"].accuracy.value < 0.7
    assert trials["imagenet"].accuracy is None or trials["imagenet"].accuracy.value < 0.7
    assert set(PLAIN) <= set(trials)


def test_a_candidate_that_does_not_fit_says_why(eval_request: EvalRequest) -> None:
    trial = try_preprocess(eval_request, ["crop=64,layout=model", "bgr-mean"])
    assert [attempt.preprocess for attempt in trial.tries][-1] == "crop=64,layout=model"
    assert "smaller than the crop" in str(trial.tries[-1].reason)


def test_refuses_trials_without_a_task_or_with_two_models(eval_request: EvalRequest) -> None:
    model, data = eval_request.model, eval_request.data
    with pytest.raises(UsageError, match="accuracy"):
        try_preprocess(EvalRequest(model, data))
    with pytest.raises(UsageError, match="one model"):
        try_preprocess(EvalRequest(model, data, task="classification", reference=model))
    with pytest.raises(DataError):
        try_preprocess(EvalRequest(model, data, task="classification"), ["crop=64"])


def test_the_command(eval_request: EvalRequest) -> None:
    arguments = ["eval", str(eval_request.model), "--data", str(eval_request.data), "--task", "classification"]
    arguments += ["--preprocess", eval_request.preprocess, "--try-preprocess"]
    report = json.loads(CliRunner().invoke(group, [*arguments, "--json"]).stdout)
    assert report["samples"] == 40
    assert report["best"] in report["tied"]
    assert {"preprocess", "title", "metrics", "reason"} == set(report["candidates"][0])
    human = CliRunner().invoke(group, arguments)
    assert human.exit_code == 0
    assert "bgr-mean" in human.output


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
    model, data = tmp_path / "m.onnx", tmp_path / "images"
    with pytest.raises(DataError, match=r"Type `preprocess` grey\S* if the model was trained with it") as caught:
        open_or_search(Data(data), model_signature(model), session=lambda: open_session(model))
    assert "or give labels" in caught.value.fix
    samples = open_samples(data, model_signature(model), preprocess="grey")
    assert [sample.inputs["x"].shape for sample in samples] == [(1, 1, SIZE, SIZE)] * 3


@pytest.fixture
def folders(eval_request: EvalRequest) -> Path:
    """Save the samples of `eval_request` as images in class folders."""
    with np.load(eval_request.data) as arrays:
        root = eval_request.model.parent / "classes"
        for number, (pixels, label) in enumerate(zip(arrays["X"], arrays["Y"], strict=True)):
            (root / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / str(label) / f"{number}.png")
    return root


def test_labels_decide_on_the_preprocessing(eval_request: EvalRequest, folders: Path) -> None:
    model = eval_request.model
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    signature = model_signature(model)
    samples = open_or_search(Data(folders), signature, session=lambda: open_session(model), progress=Noting())
    assert isinstance(samples, SourceSamples)
    assert samples.preprocess is not None
    assert samples.preprocess.name == "bgr-mean"
    assert any(note.startswith("found: preprocessing bgr-mean: top1 100.00\u202f% on 16 samples") for note in notes)


def test_the_best_of_a_tie_wins_and_wrong_labels_are_named(eval_request: EvalRequest, folders: Path) -> None:
    session, signature = open_session(eval_request.model), model_signature(eval_request.model)
    names = ["bgr-mean", "caffe2", "channels=BGR,subtract=[103.9,116.7,123.7],layout=model", "unit"]
    search_result = search(session, signature, Data(folders), names=names)
    assert search_result.tied == 2  # caffe2 gives the same inputs
    assert search_result.decided == "bgr-mean"
    assert "which these samples do not show to be worse" in search_result.decision_note
    # A mapping to other numbers would give a model other ranges, so equally good ones need an answer.
    twice = "channels=BGR,subtract=[103.939,116.779,123.68],divide=0.5,layout=model"
    rivals = search(session, signature, Data(folders), names=["bgr-mean", twice, "unit"])
    assert rivals.decided is None
    assert "40 samples cannot tell these apart: bgr-mean 100.00\u202f%" in rivals.question
    flipped = Labels({path.name: number % 2 for number, path in enumerate(sorted(folders.rglob("*.png")))})
    doubted = search(session, signature, Data(folders, labels=flipped), names=names)
    assert doubted.decided is None
    assert "None of 3 preprocessings fits the labels" in doubted.question
    assert search(session, signature, Data(folders, labels="none"), names=names).metric == BITS


def test_older_names_are_not_proposed() -> None:
    older = {"caffe", "caffe2", "mxnet", "rcnn", "preprocess_method1", "preprocess_method2"}
    assert older <= set(names())
    assert not older & set(candidates())
    assert not any(name in choices() for name in ("preprocess_method1", "caffe2"))
    assert "yolox" in candidates("detection")
    assert "yolox" not in candidates("classification")


def test_every_command_finds_the_same(eval_request: EvalRequest, folders: Path) -> None:
    model, data = str(eval_request.model), ("--data", str(folders))
    quantized, statistics = f"{folders}.int8.onnx", f"{folders}.cal"
    timing_options = ("--duration", "0.01", "--queries", "1")
    for line in (
        ("quantize", model, *data, "--as-is", "--no-timing", "-o", quantized),
        ("calibrate", model, *data, "-o", statistics),
        ("debug", model, quantized, *data),
        ("bench", model, *data, *timing_options),
        ("eval", model, *data),
    ):
        ran = CliRunner().invoke(group, line)
        assert ran.exit_code == 0, ran.output
        assert "found: preprocessing bgr-mean: top1 100.00 % on 16 samples" in ran.output.replace("\n", " "), line


@pytest.mark.parametrize("form", ["npy", "npz", "one file"])
def test_arrays_of_images_are_searched_as_images_are(eval_request: EvalRequest, tmp_path: Path, form: str) -> None:
    with np.load(eval_request.data) as arrays:
        images, labels = arrays["X"], arrays["Y"]
    root = tmp_path / "arrays"
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / ("blue", "red")[label]
        folder.mkdir(parents=True, exist_ok=True)
        if form == "npy":
            np.save(folder / f"{number}.npy", pixels)
        else:
            np.savez(folder / f"{number}.npz", pixels=pixels)
    data = Data(tmp_path / "d.npz" if form == "one file" else root)
    signature = model_signature(eval_request.model)
    samples = open_or_search(data, signature, session=lambda: open_session(eval_request.model))
    assert isinstance(samples, SourceSamples)
    assert samples.preprocess is not None
    assert samples.preprocess.name == "bgr-mean"
    assert sorted(int(sample.label) for sample in samples) == sorted(labels.tolist())


def test_a_class_offset_that_one_preprocessing_shows_counts_for_all(tmp_path: Path) -> None:
    # Class 0 is the background. Only the correct order of colours gets enough of the first samples right to show this.
    body = f"""g (float[N, 3, {SIZE}, {SIZE}] x) => (float[N, 4] y) <float[3, 4] w = {{0,1,0,0, 0,0,1,0, 0,0,0,1}}> {{
        p = GlobalAveragePool(x)
        f = Flatten(p)
        y = MatMul(f, w)
    }}"""
    onnx.save(proto(body), tmp_path / "m.onnx")
    random = np.random.default_rng(1)
    labels = random.integers(0, 3, 48)
    images = random.integers(0, 100, (48, SIZE, SIZE, 3)).astype(np.uint8)
    images[np.arange(48), ..., labels] += 60
    np.savez(tmp_path / "d.npz", image=images, label=labels)
    session, signature = open_session(tmp_path / "m.onnx"), model_signature(tmp_path / "m.onnx")
    search_result = search(session, signature, Data(tmp_path / "d.npz"), names=["unit", "unit-bgr", "bgr", "rgb"])
    values = {candidate.preprocess: candidate.value for candidate in search_result.ranked}
    assert values["unit"] == 1.0
    assert set(values) == {"unit", "rgb"}


def test_a_detector_gets_the_preprocessing_of_its_head(tmp_path: Path) -> None:
    cells = 12 * 12 + 6 * 6 + 3 * 3
    body = f"""g (float[1, 3, 96, 96] x) => (float[1, {cells}, 85] y) {{
        m = ReduceMax <keepdims = 0> (x)
        z = Mul(m, m)
        s = Tanh(z)
        y = Add(w, s)
    }}"""
    boxes = np.zeros((1, cells, 85), np.float32)
    boxes[..., :4] = -1
    onnx.save(proto(body, {"w": boxes}), tmp_path / "m.onnx")
    (tmp_path / "images").mkdir()
    for number in range(3):
        Image.fromarray(np.full((64, 64, 3), 60 * number, np.uint8)).save(tmp_path / "images" / f"{number}.png")
    line = ("quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "images"), "-o", str(tmp_path / "q.onnx"))
    ran = CliRunner().invoke(group, line)
    assert "found: preprocessing yolox, which suits the head yolox" in ran.output.replace("\n", " ")


def test_images_for_a_model_of_two_inputs_are_refused(tmp_path: Path) -> None:
    body = """g (float[N, 3, 4, 4] x, float[N, 3] s) => (float[N, 3] y) {
        p = GlobalAveragePool(x)
        f = Flatten(p)
        y = Add(f, s)
    }"""
    onnx.save(proto(body), tmp_path / "m.onnx")
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "a.png")
    model = tmp_path / "m.onnx"
    with pytest.raises(
        DataError, match=r"contains images, but the model takes x: float32\[N, 3, 4, 4\]; s: "
    ) as caught:
        open_or_search(Data(tmp_path), model_signature(model), session=lambda: open_session(model))
    assert "Give .npz files with an array for each" in caught.value.fix
