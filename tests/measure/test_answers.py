"""Compare the figures of answers with brute force, and judge a small detector by its answers through the jobs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.head import Head
from edgeq_device.answers.match import compute_oks, match_objects
from edgeq_device.program import open_model
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import edgeq
from edgeq.cli import group
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_meter import (
    AnswerTallies,
    compare_frames,
    compare_maps,
    compare_objects,
    compare_texts,
)
from edgeq.measure.answer_task import FloatAnswers, PackedAnswer
from edgeq.measure.edit_distance import count_edits

LETTERS = st.text(alphabet="abc ", max_size=7)


def detections(*rows: tuple[float, float, float, float, float, int]) -> Answer:
    """Return an answer of rows (x1, y1, x2, y2, score, class)."""
    table = np.array(rows, np.float64).reshape(-1, 6)
    return Answer("detect", boxes=table[:, :4], scores=table[:, 4], classes=table[:, 5].astype(np.int64))


def overlap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(width, 0) * max(height, 0)
    return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)


@given(st.integers(0, 2**32 - 1))
def test_objects_are_matched_as_by_hand(seed: int) -> None:
    random = np.random.default_rng(seed)
    answers = []
    for count in random.integers(0, 8, 2):
        corner = random.uniform(0, 30, (count, 2))
        boxes = np.concatenate([corner, corner + random.uniform(5, 30, (count, 2))], axis=1)
        scores, classes = random.uniform(0, 1, count), random.integers(0, 2, count)
        answers.append(Answer("detect", boxes=boxes, scores=scores, classes=classes))
    reference, candidate = answers
    free = set(range(len(candidate)))
    expected = {}
    for place in sorted(range(len(reference)), key=lambda i: -reference.scores[i]):
        rivals = [i for i in sorted(free) if candidate.classes[i] == reference.classes[place]]
        best = max(rivals, key=lambda i: overlap(reference.boxes[place], candidate.boxes[i]), default=None)
        if best is not None and overlap(reference.boxes[place], candidate.boxes[best]) >= 0.5:
            expected[place] = best
            free.discard(best)
    pairs = match_objects(reference, candidate)
    assert dict(zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)) == expected


def test_objects_that_only_the_threshold_hides_are_found() -> None:
    reference = detections((0, 0, 10, 10, 0.9, 0), (20, 20, 30, 30, 0.3, 0), (40, 0, 50, 10, 0.8, 1))
    candidate = detections((0, 0, 10, 9, 0.8, 0), (20, 20, 30, 30, 0.2, 0), (60, 60, 70, 70, 0.5, 1))
    tally = compare_objects(reference, candidate, 0.25)
    # Float gives three objects, of which two are found; the model gives two, of which one is confirmed.
    # The first box overlaps by 0.9, which is 9 of COCO's 10 overlaps, and counts once for each model.
    assert (tally.agreeing[""], tally.total[""]) == (pytest.approx(2 * 0.9 + 1), 5)
    figures = AnswerTallies([tally]).figures("matched")
    assert figures["matched"] == pytest.approx(2.8 / 5)
    lenient = compare_objects(reference, candidate, 0.25, overlaps=(0.5,))
    assert lenient.agreeing[""] == 3
    assert figures["found"] == pytest.approx(2 / 3)
    assert figures["below"] == pytest.approx(1 / 3)
    assert figures["extra"] == pytest.approx(1 / 2)
    assert figures["score_bias"] == pytest.approx(-0.1)


def test_masks_and_keypoints_decide_too() -> None:
    masks = np.zeros((1, 20, 20), bool)
    masks[0, :10, :10] = True
    masked = Answer("segment", np.array([[0.0, 0, 10, 10]]), np.array([0.9]), np.array([0]), masks=masks)
    shifted = Answer("segment", masked.boxes, masked.scores, masked.classes, masks=np.roll(masks, 8, axis=2))
    assert len(match_objects(masked, masked)[0]) == 1
    assert len(match_objects(masked, shifted)[0]) == 0
    points = np.array([[[2.0, 2, 1], [8, 8, 1], [5, 5, 0]]])
    box = np.array([0.0, 0, 10, 10])
    moved = points[0] + [3.0, 0, 0]
    # Two visible points, each three pixels off, with COCO's mean deviation.
    assert compute_oks(points[0], moved, box) == pytest.approx(np.exp(-9 / (2 * 100 * 0.12**2)))
    assert compute_oks(points[0], points[0], box) == 1


@given(LETTERS, LETTERS)
def test_edits_are_those_of_the_whole_table(first: str, second: str) -> None:
    table = np.zeros((len(first) + 1, len(second) + 1), int)
    for i, j in itertools.product(range(len(first) + 1), range(len(second) + 1)):
        if not i or not j:
            table[i, j] = i + j
            continue
        replaced = table[i - 1, j - 1] + (first[i - 1] != second[j - 1])
        table[i, j] = min(replaced, table[i - 1, j] + 1, table[i, j - 1] + 1)
    assert count_edits(first, second) == table[-1, -1]


def test_texts_and_frames() -> None:
    tally = compare_texts(Answer("text", text="abcd"), Answer("text", text="abxd"), 0.5)
    assert AnswerTallies([tally]).figures("characters") == {"characters": 0.75, "exact": 0.0}
    reference, candidate = (Answer("voice", vector=np.array(v)) for v in ([0.1, 0.6, 0.9, 0.4], [0.2, 0.4, 0.8, 0.4]))
    assert AnswerTallies([compare_frames(reference, candidate, 0.5)]).figures("frames") == {"frames": 0.75}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_maps_by_counting_pixels(seed: int) -> None:
    random = np.random.default_rng(seed)
    pairs = [tuple(random.integers(0, 4, (6, 7)) for _ in range(2)) for _ in range(3)]
    tallies = AnswerTallies([compare_maps(Answer("semantic", map=r), Answer("semantic", map=c), 0.5) for r, c in pairs])
    ious = []
    for number in range(4):
        both = sum(int(((r == number) & (c == number)).sum()) for r, c in pairs)
        union = sum(int(((r == number) | (c == number)).sum()) for r, c in pairs)
        ious += [both / union] if union else []
    assert tallies.figures("mIoU")["mIoU"] == pytest.approx(np.mean(ious))
    # Over halves, the figure is that of their samples alone.
    halves = np.array([[True, False, True], [False, False, False]])
    alone = AnswerTallies([tallies.tallies[0], tallies.tallies[2]]).figures("mIoU")["mIoU"]
    np.testing.assert_allclose(tallies.primary_over(halves), [alone, 1.0])


def test_a_packed_answer_is_the_answer() -> None:
    masks = np.random.default_rng(0).random((2, 30, 40)) > 0.5
    answer = Answer("segment", np.zeros((2, 4)), np.array([0.5, 0.4]), np.array([1, 0]), masks=masks, labels=("a", "b"))
    unpacked = PackedAnswer.of(answer).unpack()
    np.testing.assert_array_equal(unpacked.masks, masks)
    np.testing.assert_array_equal(unpacked.scores, answer.scores)
    assert (unpacked.names, unpacked.keypoints) == (("b", "a"), None)


def test_refuses_samples_with_other_labels() -> None:
    meter = FloatAnswers(Head("yolov8", {"rows": "y"})).start()
    with pytest.raises(DataError, match="has no answer of the float model"):
        meter.update({}, Sample("s", {}, label=3))


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a detector of two classes with random weights, Ultralytics' metadata, and images next to it."""
    folder = tmp_path_factory.mktemp("detector")
    random = np.random.default_rng(5)
    layers = []
    arrays = {}
    name = "images"
    for index, (inputs, outputs, stride) in enumerate(((3, 12, 2), (12, 16, 2), (16, 6, 2))):
        arrays[f"w{index}"] = random.normal(0, 0.35, (outputs, inputs, 3, 3)).astype(np.float32)
        arrays[f"b{index}"] = random.normal(0, 0.2, outputs).astype(np.float32)
        names = [name, f"w{index}", f"b{index}"]
        layers.append(
            helper.make_node("Conv", names, [f"c{index}"], f"conv{index}", pads=[1] * 4, strides=[stride] * 2)
        )
        name = f"c{index}"
        if index < 2:
            layers.append(helper.make_node("Relu", [name], [f"r{index}"], f"relu{index}"))
            name = f"r{index}"
    # Few cells score above the threshold, as in a real detector.
    arrays["w2"][4:] *= 0.3
    arrays["b2"][4:] = -1.7
    arrays["shape"] = np.array([1, 6, 64])
    arrays["side"] = np.array([64, 64, 32, 32, 1, 1], np.float32).reshape(1, 6, 1)
    layers += [
        helper.make_node("Reshape", [name, "shape"], ["flat"], "flat"),
        helper.make_node("Sigmoid", ["flat"], ["shares"], "shares"),
        helper.make_node("Mul", ["shares", "side"], ["output0"], "boxes"),
    ]
    graph = helper.make_graph(
        layers,
        "detector",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 64, 64])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, [1, 6, 64])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(
        model, {"task": "detect", "names": "{0: 'cat', 1: 'dog'}", "stride": "8", "imgsz": "[64, 64]"}
    )
    onnx.save(model, folder / "detector.onnx")
    (folder / "images").mkdir()
    for number in range(12):
        pixels = random.integers(0, 255, (8, 10, 3), np.uint8)
        Image.fromarray(pixels).resize((100, 80)).save(folder / "images" / f"{number:02}.png")
    return folder


def test_a_detector_without_labels_is_judged_by_its_answers(detector: Path, tmp_path: Path) -> None:
    result = edgeq.quantize(
        detector / "detector.onnx", detector / "images", tmp_path / "int8.onnx", timed=False, effort=None
    )
    accuracy = result.proof.accuracy
    assert (accuracy["float32"].task, accuracy["float32"].value) == ("answers", 1.0)
    assert 0.3 < accuracy["int8"].value < 1
    assert result.proof.answers
    assert not result.proof.labelled
    compared = edgeq.compare(
        detector / "detector.onnx", tmp_path / "int8.onnx", data=detector / "images", preprocess="yolo", timed=False
    )
    assert compared.b.accuracy is not None
    assert compared.b.accuracy.value == pytest.approx(accuracy["int8"].value)


def test_a_limit_needs_no_labels_where_answers_are_known(detector: Path, tmp_path: Path) -> None:
    model, images = detector / "detector.onnx", detector / "images"
    options = ["--no-timing", "--as-is", "-o", str(tmp_path / "m.onnx")]
    command = ["quantize", str(model), "--data", str(images), *options, "--max-drop"]
    assert CliRunner().invoke(group, [*command, "60pt"]).exit_code == 0
    refused = CliRunner().invoke(group, [*command[:-1], "--head", "none", "--force", "--max-drop", "60pt"])
    assert refused.exit_code == 2
    assert "needs labels" in refused.output


def test_debug_tells_what_answers_cost(detector: Path, tmp_path: Path) -> None:
    model, images, output = detector / "detector.onnx", detector / "images", tmp_path / "int8.onnx"
    edgeq.quantize(model, images, output, timed=False, effort=None)
    arguments = ["debug", str(model), str(output), "--data", str(images), "--preprocess", "yolo", "--json"]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["answers"]["task"] == "answers"
    assert "of float32's answers are given again" in record["verdict_text"]


def test_a_bundle_records_the_threshold_that_finds_as_much_as_float(detector: Path, tmp_path: Path) -> None:
    model, images = detector / "detector.onnx", detector / "images"
    packaged = edgeq.package(
        model, images, tmp_path / "bundle", threshold="float-recall", timed=False, effort=None, emulate=False
    )
    (variant,) = packaged.variants.values()
    point = variant.proof.operating
    assert point is not None
    with open_model(tmp_path / "bundle") as bundle:
        assert bundle.head is not None
        assert bundle.head.thresholds["confidence"] == pytest.approx(point.lowered, abs=1e-6)
        answer = bundle.answer(images / "00.png")
        assert answer.image_size == (100, 80)
        assert set(answer.names) <= {"cat", "dog"}
        assert len(bundle.answer(images / "00.png", 0.999)) <= len(answer)


@pytest.mark.parametrize("threshold", ["2", "high", "nan"])
def test_refuses_a_threshold_that_is_no_score(detector: Path, threshold: str) -> None:
    arguments = ["quantize", str(detector / "detector.onnx"), "--data", str(detector / "images")]
    result = CliRunner().invoke(group, [*arguments, "--threshold", threshold])
    assert result.exit_code == 2
    assert "Give a score from 0 to 1, or float-recall" in result.output


def test_a_gate_limits_lost_answers(detector: Path, tmp_path: Path) -> None:
    model, images, output = detector / "detector.onnx", detector / "images", tmp_path / "int8.onnx"
    edgeq.quantize(model, images, output, timed=False, effort=None)
    arguments = ["gate", str(output), "--baseline", str(model), "--data", str(images), "--preprocess", "yolo"]
    result = CliRunner().invoke(group, [*arguments, "--json"])
    record = json.loads(result.stdout)
    (accuracy,) = (check for check in record["checks"] if check["what"] == "accuracy")
    assert (accuracy["limit"], accuracy["outcome"]) == (pytest.approx(0.1), "missed")
