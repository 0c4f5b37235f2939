"""Test that a figure of the float model that is no better than chance is refused, and that a hard small set is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.data.open_source import Data
from edgeq.errors import CheckFailedError
from edgeq.jobs.quantize import quantize
from edgeq.measure.boxes import Detections
from edgeq.measure.coco import load_annotations
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.settle import check_skill
from edgeq.measure.skill import find_doubts
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification
from edgeq.measure.tasks.detection import Detection
from edgeq.measure.tasks.similarity import Similarity
from tests.graphs import proto
from tests.measure.fakes import FakeSample, FakeSamples, FakeSession

CLASSES = 4


def echo(name: str = "x") -> FakeSession:
    """Return a session whose output is its input."""
    return FakeSession(lambda feed: {"y": feed[name]}, ["y"])


def classified(count: int, right: float) -> tuple[Any, FakeSession, FakeSamples]:
    """Return labelled rows of class scores. A share `right` of the labels is correct, the others are random."""
    random = np.random.default_rng(1)
    best = random.integers(0, CLASSES, count)
    labels = np.where(random.random(count) < right, best, random.integers(0, CLASSES, count))
    rows = [
        FakeSample(f"{n}", {"x": np.eye(CLASSES)[[b]]}, int(y))
        for n, (b, y) in enumerate(zip(best, labels, strict=True))
    ]
    return Classification(), echo(), FakeSamples(rows)


def anomalies(count: int, right: float) -> tuple[Any, FakeSession, FakeSamples]:
    """Return samples with reconstruction errors from 0 to 1. A share `right` of the labels depends on the error."""
    random = np.random.default_rng(1)
    errors = random.random(count)
    labels = np.where(random.random(count) < right, errors > 0.5, random.integers(0, 2, count))
    rows = [
        FakeSample(f"{n}", {"x": np.full((1, 2), e)}, int(y))
        for n, (e, y) in enumerate(zip(errors, labels, strict=True))
    ]
    return Anomaly(), FakeSession(lambda feed: {"y": np.zeros((1, 2))}, ["y"]), FakeSamples(rows)


def pairs(count: int, right: float) -> tuple[Any, FakeSession, FakeSamples]:
    """Return pairs of embeddings. A share `right` of the scores is the cosine, the others are random."""
    random = np.random.default_rng(1)
    cosines = random.random(count)
    scores = np.where(random.random(count) < right, cosines, random.random(count))
    rows = [
        FakeSample(f"{n}", {"x": np.array([[1.0, 0.0], [c, np.sqrt(1 - c * c)]])}, float(y))
        for n, (c, y) in enumerate(zip(cosines, scores, strict=True))
    ]
    return Similarity(), echo(), FakeSamples(rows)


def detected(folder: Path, count: int, right: float) -> tuple[Any, FakeSession, FakeSamples]:
    """Return images with one object each. A share `right` of the boxes is correct, the others are in a corner."""
    random = np.random.default_rng(1)
    places = random.integers(20, 60, (count, 2))
    images = [{"id": n, "file_name": f"{n}", "width": 100, "height": 100} for n in range(count)]
    objects = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [int(x), int(y), 20, 20], "area": 400, "iscrowd": 0}
        for n, (x, y) in enumerate(places)
    ]
    coco = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cup"}]}
    (folder / "instances.json").write_text(json.dumps(coco))
    boxes = np.where(random.random((count, 1)) < right, np.concatenate([places, places + 20.0], axis=1), [0, 0, 5, 5])
    inputs = [{"x": np.full((1, 3, 100, 100), n, np.float32)} for n in range(count)]
    rows = [FakeSample(f"{n}", feed, context={"file": f"{n}"}) for n, feed in enumerate(inputs)]

    def decode(outputs: Any, size: tuple[int, int]) -> Detections:
        return Detections(outputs["y"], np.ones(1), np.zeros(1, np.int64))

    session = FakeSession(lambda feed: {"y": boxes[[int(feed["x"].flat[0])]]}, ["y"])
    return Detection(load_annotations(folder / "instances.json"), decode), session, FakeSamples(rows)


KINDS: dict[str, Callable[..., tuple[Any, FakeSession, FakeSamples]]] = {
    "classification": classified,
    "anomaly": anomalies,
    "similarity": pairs,
}


def case(kind: str, folder: Path, count: int, right: float) -> tuple[Any, FakeSession, FakeSamples]:
    return detected(folder, count, right) if kind == "detection" else KINDS[kind](count, right)


EVERY = [*KINDS, "detection"]


@pytest.mark.parametrize("kind", EVERY)
def test_a_model_no_better_than_chance_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckFailedError, match="no better than a guess") as raised:
        check_skill(*case(kind, tmp_path, 600, 0.0))
    assert raised.value.exit_code == 10
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_few_samples_are_never_refused(tmp_path: Path, kind: str, count: int) -> None:
    check_skill(*case(kind, tmp_path, count, 0.0))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("count", [12, 40, 200])
def test_a_hard_set_is_not_refused(tmp_path: Path, kind: str, count: int) -> None:
    check_skill(*case(kind, tmp_path, count, 0.45))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("right", "doubtful"), [(0.0, True), (0.9, False)])
def test_eval_doubts_such_figures(tmp_path: Path, kind: str, right: float, *, doubtful: bool) -> None:
    task, session, samples = case(kind, tmp_path, 100, right)
    meter = task.start()
    for sample in samples:
        meter.update({"y": session.run(["y"], sample.inputs)[0]}, sample)
    assert any("proves nothing" in doubt for doubt in find_doubts(meter)) == doubtful


def test_a_task_that_knows_no_chance_is_not_checked() -> None:
    class Plain:
        name, primary, higher_is_better = "plain", "error", False

        def start(self) -> object:
            return object()

    check_skill(Plain(), echo(), FakeSamples([]))  # type: ignore[arg-type]


def test_quantize_refuses_and_eval_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    weights = random.normal(size=(8, 4)).astype(np.float32)
    onnx.save(proto("g (float[n, 8] x) => (float[n, 4] y) { y = MatMul(x, w) }", {"w": weights}), "m.onnx")
    np.savez("val.npz", x=random.normal(size=(96, 8)).astype(np.float32), label=random.integers(0, 4, 96))
    data = Data("val.npz", "key=x,label=label")
    with pytest.raises(CheckFailedError, match=r"in float32, top-1 is .*, no better than a guess \(2"):
        quantize("m.onnx", data, "q.onnx", val=data, task="classification", timed=False)
    assert not Path("q.onnx").exists()
    result = run_evaluation(EvalRequest(Path("m.onnx"), "val.npz", "classification", preprocess="key=x,label=label"))
    assert result.accuracy is not None
    assert any("no better than a guess" in doubt for doubt in result.accuracy.doubts)
