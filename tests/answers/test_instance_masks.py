"""Encode instances with masks as YOLO, torchvision and MMDetection export them, and decode them again."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.answers.answer import Answer
from edgeq_device.answers.family import View, load_family
from edgeq_device.errors import DataError
from edgeq_device.prepare.frame import Frame

from tests.answers.scenes import answer_of, draw_objects, frame_cases, make_frame

SIZE = (640, 512)
ORIGINAL = (933, 657)
ROUND_TRIPS = pytest.mark.parametrize(("kind", "seed"), frame_cases())


def draw_ellipses(boxes: np.ndarray, frame: Frame) -> np.ndarray:
    """Return the ellipses within boxes, in the stored image, except for what a crop removed."""
    width, height = frame.original
    points = np.stack(np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5), axis=-1)
    x, y = np.moveaxis(frame.to_input(points), -1, 0)
    visible = (x >= 0) & (x < frame.size[0]) & (y >= 0) & (y < frame.size[1])
    return np.stack([(ellipse(box, x, y) > 0) & visible for box in boxes])


def ellipse(box: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a value that is positive inside the ellipse that fills nine tenths of a box."""
    (cx, cy), (w, h) = (box[:2] + box[2:]) / 2, (box[2:] - box[:2]) / 2
    return 0.9 - np.sqrt(((x - cx) / w) ** 2 + ((y - cy) / h) ** 2)


def check_masks(answer: Answer, frame: Frame, boxes: np.ndarray, overlap: float = 0.99) -> None:
    order = np.argsort(answer.boxes[:, 0])
    np.testing.assert_allclose(answer.boxes[order], frame.to_original(boxes), atol=0.5)
    assert answer.masks is not None
    truth, masks = draw_ellipses(boxes, frame), answer.masks[order]
    ious = (truth & masks).sum(axis=(1, 2)) / (truth | masks).sum(axis=(1, 2))
    assert ious.min() >= overlap


@ROUND_TRIPS
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_decodes_yolo_seg(kind: str, seed: int, layout: str) -> None:
    frame = make_frame(kind, SIZE, ORIGINAL)
    boxes, _ = draw_objects(seed, 3, 1, SIZE)
    y, x = np.mgrid[2 : SIZE[1] : 4, 2 : SIZE[0] : 4]
    # The best prototype of each object is its mask, and one is noise.
    noise = np.random.default_rng(seed).normal(size=x.shape)
    prototypes = np.stack([*(ellipse(box, x, y) for box in boxes), noise])[None].astype(np.float32)
    rows = np.zeros((1, 4 + 5 + 4, 6720), np.float32)
    rows[0, :2, :3], rows[0, 2:4, :3] = ((boxes[:, :2] + boxes[:, 2:]) / 2).T, (boxes[:, 2:] - boxes[:, :2]).T
    rows[0, 4 + seed, :3] = 0.8
    rows[0, 9:12, :3] = np.eye(3)
    outputs = {"output0": rows, "output1": prototypes if layout == "NCHW" else prototypes.transpose(0, 2, 3, 1)}
    fit = load_family("yolo-seg").fit(View(outputs, SIZE))
    assert fit is not None
    answer = answer_of("yolo-seg", fit, outputs, frame)
    check_masks(answer, frame, boxes)
    assert answer.classes.tolist() == [seed] * 3


def encode_instances(writer: str, form: str, boxes: np.ndarray) -> dict[str, np.ndarray]:
    """Return outputs with masks in the box's frame (28 x 28) or in the input's."""
    if form == "pasted":
        y, x = np.mgrid[: SIZE[1], : SIZE[0]] + 0.5
        masks = np.stack([np.clip(0.5 + 5 * ellipse(box, x, y), 0, 1) for box in boxes])
    else:
        y, x = (np.mgrid[:28, :28] + 0.5) / 28
        one = np.clip(0.5 + 2 * ellipse(np.array([0, 0, 1, 1]), x, y), 0, 1)
        masks = np.repeat(one[None], len(boxes), axis=0)
    masks, scores = masks.astype(np.float32), np.linspace(0.9, 0.7, len(boxes)).astype(np.float32)
    if writer == "torchvision":
        labels = np.array([1, 3, 17][: len(boxes)], np.int64)
        return {"boxes": boxes.astype(np.float32), "labels": labels, "scores": scores, "masks": masks[:, None]}
    rows = np.zeros((1, len(boxes) + 2, 5), np.float32)
    rows[0, : len(boxes)] = np.column_stack([boxes, scores])
    labels = np.full((1, len(boxes) + 2), -1, np.int64)
    labels[0, : len(boxes)] = [0, 2, 15][: len(boxes)]
    filler = np.zeros((2, *masks.shape[1:]), np.float32)
    return {"dets": rows, "labels": labels, "masks": np.concatenate([masks, filler])[None]}


@ROUND_TRIPS
@pytest.mark.parametrize("writer", ["torchvision", "mmdetection"])
@pytest.mark.parametrize("form", ["pasted", "box"])
def test_decodes_mask_rcnn(kind: str, seed: int, writer: str, form: str) -> None:
    frame = make_frame(kind, SIZE, ORIGINAL)
    boxes, _ = draw_objects(seed, 3, 1, SIZE)
    outputs = encode_instances(writer, form, boxes)
    fit = load_family("mask-rcnn").fit(View(outputs, SIZE, classes=80))
    assert fit is not None
    answer = answer_of("mask-rcnn", fit, outputs, frame)
    check_masks(answer, frame, boxes)
    # torchvision numbers COCO's classes from 1 and with gaps: its 17 is the 16th class.
    assert answer.classes.tolist() == [0, 2, 15]


@pytest.mark.parametrize("writer", ["torchvision", "mmdetection"])
def test_an_image_without_instances_is_an_empty_answer(writer: str) -> None:
    outputs = encode_instances(writer, "box", np.zeros((0, 4)))
    fit = load_family("mask-rcnn").fit(View(outputs, SIZE))
    assert fit is not None
    answer = answer_of("mask-rcnn", fit, outputs, make_frame("stretch", SIZE, ORIGINAL))
    assert len(answer) == 0
    assert answer.masks is not None
    assert answer.masks.shape == (0, *ORIGINAL[::-1])


def test_refuses_masks_that_do_not_belong_to_the_objects() -> None:
    boxes, _ = draw_objects(0, 3, 1, SIZE)
    outputs = encode_instances("torchvision", "box", boxes)
    family = load_family("mask-rcnn")
    assert family.fit(View({**outputs, "masks": outputs["masks"][:2]}, SIZE)) is None
    assert family.fit(View({**outputs, "masks": outputs["masks"] * 9}, SIZE)) is None
    fit = family.fit(View(outputs, SIZE))
    assert fit is not None
    with pytest.raises(DataError, match="does not fit the outputs"):
        answer_of("mask-rcnn", fit, {**outputs, "masks": outputs["masks"][:1]}, make_frame("stretch", SIZE, ORIGINAL))
