"""Find task, decoder and preprocessing from images and a COCO file, for detectors that are right by construction.

Each model reads a number from the colour of an image and looks up the head's outputs for the annotated boxes. It is
right only under the preprocessing that it expects: the boxes are in that geometry, and the number in that channel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from edgeq.jobs.quantize import quantize
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.find_task import find_annotations
from edgeq.measure.task import TaskOptions
from edgeq.util.display import Silent
from tests.graphs import proto

SIDE, CLASSES, STEP = 192, 3, 15
SIZES = ((160, 120), (100, 180), (192, 192), (90, 60))
Boxes = list[tuple[float, float, float, float, int]]  # left, top, right, bottom, class
Place = Callable[[float, float, float, float], tuple[float, float]]


def truth(random: np.random.Generator, number: int) -> tuple[tuple[int, int], Boxes]:
    """Return the size and the boxes of an image in pixels. No two boxes have the same class."""
    width, height = SIZES[number % len(SIZES)]
    boxes = []
    for label in range(1 + number % CLASSES):
        wide, high = random.uniform(0.3, 0.5, 2) * (width, height)
        left, top = random.uniform(0, 0.5, 2) * (width, height)
        boxes.append((left, top, left + wide, top + high, label))
    return (width, height), boxes


def geometry(kind: str, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the scale and the shift of both axes from pixels of the image to pixels of the model's input."""
    width, height = size
    if kind == "nanodet":
        return SIDE / width, SIDE / height, 0, 0
    scale = min(SIDE / width, SIDE / height)
    wide, high = math.floor(width * scale), math.floor(height * scale)
    centred = kind == "yolo"
    left, top = ((SIDE - wide) // 2, (SIDE - high) // 2) if centred else (0, 0)
    return wide / width, high / height, left, top


def cells(strides: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(x, y, s) for s in strides for y in range(SIDE // s) for x in range(SIDE // s)]


def yolov5(boxes: Boxes) -> np.ndarray:
    rows = np.zeros((len(cells((8, 16, 32))), 5 + CLASSES))
    rows[:, 2:4] = 20
    for row, (left, top, right, bottom, label) in zip(rows, boxes, strict=False):
        row[:5] = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top, 0.9
        row[5 + label] = 0.9
    return rows


def yolov8(boxes: Boxes) -> np.ndarray:
    rows = yolov5(boxes)
    return np.delete(rows, 4, axis=1).T


def yolox(boxes: Boxes) -> np.ndarray:
    grid = cells((8, 16, 32))
    rows = np.full((len(grid), 5 + CLASSES), 0.0)
    for place, (left, top, right, bottom, label) in enumerate(boxes):
        at = 400 + 37 * place
        x, y, stride = grid[at]
        rows[at, :5] = (
            (left + right) / 2 / stride - x,
            (top + bottom) / 2 / stride - y,
            math.log((right - left) / stride),
            math.log((bottom - top) / stride),
            0.9,
        )
        rows[at, 5 + label] = 0.9
    return rows


def nanodet(boxes: Boxes) -> np.ndarray:
    grid = cells((8, 16, 32, 64))
    rows = np.zeros((len(grid), CLASSES + 32))
    for left, top, right, bottom, label in boxes:
        # The cell of a middle level that is nearest to the centre of the box.
        x, y = (min(5, round((a + b) / 2 / 32)) for a, b in ((left, right), (top, bottom)))
        at = next(i for i, cell in enumerate(grid) if cell == (x, y, 32))
        at += bool(rows[at].any())  # taken by another box
        x, y, stride = grid[at]
        sides = (x - left / stride, y - top / stride, right / stride - x, bottom / stride - y)
        logits = np.full((4, 8), -20.0)
        for row, distance in zip(logits, sides, strict=True):
            below = int(distance)
            row[below], row[below + 1] = np.log([1 - distance % 1 + 1e-9, distance % 1 + 1e-9])
        rows[at, label], rows[at, CLASSES:] = 0.9, logits.ravel()
    return rows


def ssd(boxes: Boxes) -> tuple[np.ndarray, np.ndarray]:
    corners, scores = np.zeros((120, 4)), np.zeros((120, 1 + 2 * CLASSES))
    scores[:, 0] = 1.0
    for place, (left, top, right, bottom, label) in enumerate(boxes):
        corners[place] = np.array([left, top, right, bottom]) / SIDE
        scores[place] = 0.0
        scores[place, 1 + label] = 0.9
    return corners, scores


def chosen(boxes: Boxes) -> np.ndarray:
    rows = np.zeros((20, 6))
    for row, (left, top, right, bottom, label) in zip(rows, boxes, strict=False):
        row[:] = left, top, right, bottom, 0.9, label
    return rows


def scaled(encode: Callable[[Boxes], Any], factor: float, axis: int = 1) -> Callable[[Boxes], Any]:
    """Return an encoding whose four columns (or rows) of boxes are multiplied by a factor."""

    def made(boxes: Boxes) -> Any:
        table = encode(boxes)
        boxes_table = table[0] if isinstance(table, tuple) else table
        np.moveaxis(boxes_table, axis, 0)[:4] *= factor
        return table

    return made


# Decoder → its encoding (see above) and the preprocessing that the model expects.
HEADS: dict[str, tuple[Callable[[Boxes], Any], str]] = {
    "yolov5": (yolov5, "yolo"),
    "yolov8": (yolov8, "yolo"),
    "yolox": (yolox, "yolox"),
    "nanodet": (nanodet, "nanodet"),
    "ssd": (ssd, "yolo"),
    "detections": (chosen, "yolo"),
}
# The same heads with boxes in the other unit: shares of the image instead of pixels, or pixels instead of shares.
OTHER_UNIT = {
    "yolov5": (scaled(yolov5, 1 / SIDE), "yolo"),
    "yolov8": (scaled(yolov8, 1 / SIDE, axis=0), "yolo"),
    "detections": (scaled(chosen, 1 / SIDE), "yolo"),
    "ssd": (scaled(ssd, SIDE), "yolo"),
}


def write(folder: Path, head: str, count: int = 16, heads: Any = HEADS) -> Path:
    """Write `model.onnx`, images below `val/`, and their annotations next to that folder."""
    encode, kind = heads[head]
    random = np.random.default_rng(3)
    images, objects, tables = [], [], []
    (folder / "val").mkdir()
    for number in range(count):
        size, boxes = truth(random, number)
        colour = (STEP * number, 128, 255 - STEP * number)
        Image.new("RGB", size, colour).save(folder / "val" / f"{number:03}.png")
        images.append({"id": number, "file_name": f"{number:03}.png", "width": size[0], "height": size[1]})
        for left, top, right, bottom, label in boxes:
            box = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            objects.append({"id": len(objects), "image_id": number, "category_id": label + 1, "iscrowd": 0, **box})
        x, y, dx, dy = geometry(kind, size)
        encoded = encode([(a * x + dx, b * y + dy, c * x + dx, d * y + dy, e) for a, b, c, d, e in boxes])
        tables.append(encoded if isinstance(encoded, tuple) else (encoded,))
    categories = [{"id": label + 1, "name": str(label)} for label in range(2 * CLASSES if head == "ssd" else CLASSES)]
    coco = {"images": images, "annotations": objects, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(coco))
    red, (scale, shift) = {"yolo": (0, (255.0, 0.0)), "yolox": (2, (1.0, 0.0)), "nanodet": (2, (58.395, 123.675))}[kind]
    outputs, weights, lines = [], {}, []
    for place, parts in enumerate(zip(*tables, strict=True)):
        table = np.stack(parts).astype(np.float32)
        shape = table.shape[1:]
        weights[f"t{place}"], weights[f"s{place}"] = table.reshape(count, -1), np.array([1, *shape])
        outputs.append(f"float[1, {shape[0]}, {shape[1]}] y{place}")
        lines.append(f"[look{place}] f{place} = MatMul(near, t{place})\n y{place} = Reshape(f{place}, s{place})")
    weights |= {
        "at": np.array([red]),
        "centre": np.array([SIDE // 3]),  # inside every image, wherever it is in the square
        "scale": np.float32(scale / STEP),
        "shift": np.float32(shift / STEP),
        "numbers": np.arange(count, dtype=np.float32)[None],
        "half": np.float32(0.5),
    }
    body = f"""g (float[1, 3, {SIDE}, {SIDE}] x) => ({", ".join(outputs)}) {{
        channel = Gather <axis = 1> (x, at)
        row = Gather <axis = 2> (channel, centre)
        point = Gather <axis = 3> (row, centre)
        flat = Flatten (point)
        scaled = Mul (flat, scale)
        number = Add (scaled, shift)
        away = Sub (numbers, number)
        far = Abs (away)
        is = Less (far, half)
        near = Cast <to = 1> (is)
        {chr(10).join(lines)}
    }}"""
    onnx.save(proto(body, weights), folder / "model.onnx")
    return folder / "model.onnx"


class Noting(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("head", HEADS)
def test_everything_is_found(tmp_path: Path, head: str) -> None:
    pytest.importorskip("faster_coco_eval")
    model = write(tmp_path, head)
    assert find_annotations(tmp_path / "val") == tmp_path / "instances.json"
    noting = Noting()
    result = run_evaluation(EvalRequest(model, tmp_path / "val"), progress=noting)
    assert result.accuracy is not None
    assert result.accuracy.value > 0.99, noting.notes
    assert any(f"decoder {head}" in note for note in noting.notes)
    assert any(f"preprocessing {HEADS[head][1]}:" in note for note in noting.notes)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("head", OTHER_UNIT)
def test_the_unit_of_the_boxes_is_found(tmp_path: Path, head: str, *, named: bool) -> None:
    pytest.importorskip("faster_coco_eval")
    model = write(tmp_path, head, heads=OTHER_UNIT)
    noting = Noting()
    options = TaskOptions(decoder=head) if named else TaskOptions()
    request = EvalRequest(model, tmp_path / "val", "detection" if named else None, options, preprocess="yolo")
    result = run_evaluation(request, progress=noting)
    assert result.accuracy is not None
    assert result.accuracy.value > 0.99, noting.notes
    assert any("the model's boxes are" in note for note in noting.notes)


@pytest.mark.parametrize("head", ["nanodet", "detections"])
def test_a_detector_is_quantized_in_one_line(tmp_path: Path, head: str) -> None:
    pytest.importorskip("faster_coco_eval")
    model = write(tmp_path, head)
    images = str(tmp_path / "val")
    proof = quantize(model, images, tmp_path / "q.onnx", val=images, timed=False).proof
    assert proof.accuracy["float32"].value > 0.99
    assert proof.accuracy["int8"].value > 0.97


@pytest.mark.parametrize(("images", "labels"), [("images", "labels"), ("JPEGImages", "Annotations")])
def test_finds_folders_of_labels_beside_the_images(tmp_path: Path, images: str, labels: str) -> None:
    for folder in (images, labels):
        (tmp_path / folder / "val").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / images / "val" / "a.png")
    assert find_annotations(tmp_path / images / "val") is None
    (tmp_path / labels / "val" / "a.txt").write_text("0 0.5 0.5 1 1\n", "utf-8")
    assert find_annotations(tmp_path / images / "val") == tmp_path / labels / "val"
    assert find_annotations(tmp_path / images) == tmp_path / labels
