"""Test how the head of a model is found from what files state and from the outputs, and what contradictions say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from edgeq.data.labels import Labels
from edgeq.data.open_source import Data
from edgeq.data.sample import Sample
from edgeq.describe.facts import Fact, ModelFacts
from edgeq.errors import DataError, UsageError
from edgeq.jobs.inspect import inspect
from edgeq.measure.find_head import HeadChoice, find_head
from edgeq.measure.preprocess_search import open_or_search
from edgeq.model.load import model_signature
from edgeq.prove.prepare import prepare
from edgeq.prove.request import Request
from edgeq.run.session import open_session
from edgeq.util.display import Silent
from tests.graphs import proto

SIZE, ROWS = 32, 40


class Noting(Silent):
    """Keep the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)


def detector(path: Path, classes: int, metadata: dict[str, str] | None = None) -> Path:
    """Write a model with the outputs of YOLOv8: a few boxes in pixels, and scores from 0 to 1."""
    body = f"""g (float[1, 3, {SIZE}, {SIZE}] images) => (float[1, {4 + classes}, {ROWS}] output0) {{
        c = Conv <kernel_shape = [1, 1]> (images, k)
        m = GlobalAveragePool(c)
        s = Sigmoid(m)
        f = Squeeze(s, a)
        y = Mul(f, w)
        output0 = Identity(y)
    }}"""
    weights = np.full((1, 4 + classes, ROWS), 0.5, np.float32)
    weights[:, :4] = 20
    kernel = np.ones((1, 3, 1, 1), np.float32)
    model = proto(body, {"w": weights, "k": kernel, "a": np.array([3])})
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    return path


def names(count: int) -> dict[str, str]:
    return {"stride": "32", "task": "detect", "names": str({number: f"c{number}" for number in range(count)})}


def find(path: Path, facts: ModelFacts, choice: str | None = None) -> Any:
    sample = Sample("grey", {"images": np.full((1, 3, SIZE, SIZE), 0.5, np.float32)})
    chosen = HeadChoice.parse(choice) if choice else None
    return find_head(open_session(path), model_signature(path), sample, facts, chosen)


def test_a_stated_task_and_the_outputs_give_the_head(tmp_path: Path) -> None:
    path = detector(tmp_path / "m.onnx", 3)
    head = find(path, ModelFacts(task=Fact("detect", "the task"), labels=Fact(("a", "b", "c"), "names")))
    assert head.family == "yolov8"
    assert head.labels == ("a", "b", "c")
    assert head.source["family"].startswith("the task, and the outputs output0 [1, 7, 40]")


def test_a_wrong_number_of_names_is_refused_with_both_sources_and_what_fits(tmp_path: Path) -> None:
    path = detector(tmp_path / "m.onnx", 3)
    facts = ModelFacts(task=Fact("detect", "the task"), labels=Fact(("a", "b"), "names in labels.txt"))
    with pytest.raises(UsageError) as caught:
        find(path, facts)
    assert "names in labels.txt has 2 classes" in caught.value.problem
    assert "output0 [1, 7, 40], which fit 3 classes" in caught.value.problem
    # Names that no file states only fall away.
    assert find(path, replace(facts, labels=Fact(("a", "b"), "folders", assumed=True))).labels == ()


def test_a_task_of_other_outputs_is_refused_with_the_head_that_fits(tmp_path: Path) -> None:
    path = detector(tmp_path / "m.onnx", 3)
    facts = ModelFacts(task=Fact("segment", "task 'segment' in the model's metadata"))
    with pytest.raises(UsageError, match="does not fit the model's outputs output0") as caught:
        find(path, facts)
    assert "yolov8" in caught.value.fix
    assert find(path, facts, "none") is None
    assert find(path, facts, "yolov8").family == "yolov8"


def test_a_task_of_no_family_contradicts_nothing(tmp_path: Path) -> None:
    path = detector(tmp_path / "m.onnx", 3)
    assert find(path, ModelFacts(task=Fact("speech", "a file"))) is None


def images(folder: Path) -> Path:
    folder.mkdir()
    for number in range(4):
        Image.fromarray(np.full((48, 64, 3), 40 * number, np.uint8)).save(folder / f"{number}.png")
    return folder


def test_quantizing_says_what_it_found_in_three_lines(tmp_path: Path) -> None:
    path, progress = detector(tmp_path / "m.onnx", 3, names(3)), Noting()
    request = Request.of(path, images(tmp_path / "images"), progress=progress)
    job = prepare(request, tmp_path / "work")
    assert job.head is not None
    assert job.head.family == "yolov8"
    found = [note for note in progress.notes if note.startswith("found: ")]
    assert [note.split()[1] for note in found] == ["preprocessing", "head", "3"]
    assert found[0] == (
        "found: preprocessing yolo, by task 'detect' in the model's metadata; ⟨preprocess⟩ sets another"
    )
    assert found[2] == "found: 3 names (c0, c1, c2), by names in the model's metadata; ⟨classes⟩ sets others"


def test_the_usual_preprocessing_of_the_only_head_replaces_a_search(tmp_path: Path) -> None:
    path, progress = detector(tmp_path / "m.onnx", 3), Noting()
    session = open_session(path)
    samples: Any = open_or_search(
        Data(images(tmp_path / "images")), model_signature(path), session=lambda: session, progress=progress
    )
    assert samples.preprocess.name == "yolo"
    assert "found: preprocessing yolo, which suits the head yolov8; ⟨preprocess⟩ sets another" in progress.notes


def test_the_names_of_the_user_replace_contradictory_files(tmp_path: Path) -> None:
    path = detector(tmp_path / "m.onnx", 3, names(3))
    (tmp_path / "labels.txt").write_text("x\ny\n")
    (tmp_path / "mine.txt").write_text("one\ntwo\nthree\n")
    folder = images(tmp_path / "images")
    with pytest.raises(UsageError, match=r"labels\.txt and names in .* state different labels: 2 and 3"):
        prepare(Request.of(path, folder), tmp_path / "work")
    data = Data(folder, labels=Labels(None, tmp_path / "mine.txt"))
    job = prepare(Request.of(path, data), tmp_path / "work2")
    assert job.head is not None
    assert job.head.labels == ("one", "two", "three")


def test_a_preprocessing_of_the_user_replaces_one_that_is_unclear(tmp_path: Path) -> None:
    path, folder = detector(tmp_path / "m.onnx", 3), images(tmp_path / "images")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "X", "do_center_crop": true}')
    with pytest.raises(DataError, match="leaves do_resize to the class X"):
        prepare(Request.of(path, folder), tmp_path / "work")
    assert prepare(Request.of(path, Data(folder, preprocess="unit")), tmp_path / "work2").head is not None


def test_inspect_shows_the_facts_and_the_head(tmp_path: Path) -> None:
    report = inspect(detector(tmp_path / "m.onnx", 3, names(3)), ())
    assert report.facts["labels"] == {"value": "3 names: c0, c1, c2", "source": "names in the model's metadata"}
    assert report.head is not None
    assert report.head["family"] == "yolov8"
    wrong = inspect(detector(tmp_path / "w.onnx", 4, names(3)), ())
    assert wrong.head is None
