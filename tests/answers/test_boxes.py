"""Decode what exporters of detectors write, for every family, and test that no family takes another's outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from edgeq_device.answers.decode import decode
from edgeq_device.answers.family import View, all_families, load_family
from edgeq_device.answers.head import Head
from edgeq_device.prepare.frame import Frame

from tests.answers import encodings
from tests.answers.encodings import SIZE, Truth, draw_truth

# Case → family and encoder.
CASES: dict[str, tuple[str, Callable[..., dict[str, np.ndarray]]]] = {
    "centernet": ("centernet", encodings.centernet),
    "centernet without names": ("centernet", partial(encodings.centernet, named=False)),
    "detections": ("detections", encodings.detections),
    "detections in shares": ("detections", partial(encodings.detections, unit="share")),
    "detections and zero rows": ("detections", partial(encodings.detections, fill="zero", count=100)),
    "detr by sigmoid": ("detr", encodings.detr),
    "detr by softmax": ("detr", partial(encodings.detr, softmax=True)),
    "efficientdet": ("efficientdet", encodings.efficientdet),
    "efficientdet in levels": ("efficientdet", partial(encodings.efficientdet, levels=True, sigmoid=False)),
    "mmdetection": ("mmdetection", encodings.mmdetection),
    "nanodet": ("nanodet", encodings.nanodet),
    "paddle-detection": ("paddle-detection", encodings.paddle_detection),
    "ppyoloe": ("ppyoloe", encodings.ppyoloe),
    "rf-detr": ("rf-detr", encodings.rf_detr),
    "rf-detr-seg": ("rf-detr-seg", partial(encodings.rf_detr, masks=True)),
    "rtdetr": ("rtdetr", encodings.rtdetr),
    "rtdetr of selected queries": ("rtdetr", encodings.rtdetr_selected),
    "rtdetr-official": ("rtdetr-official", encodings.rtdetr_official),
    "ssd": ("ssd", encodings.ssd),
    "ssd in pixels": ("ssd", partial(encodings.ssd, pixels=True)),
    "ssd-raw": ("ssd-raw", encodings.ssd_raw),
    "ssd-raw of logits": ("ssd-raw", partial(encodings.ssd_raw, logits=True)),
    "tf-detection": ("tf-detection", encodings.tf_detection),
    "tf-detection of the operator": ("tf-detection", encodings.tflite_operator),
    "torchvision": ("torchvision", encodings.torchvision),
    "yolo-nas": ("yolo-nas", encodings.yolo_nas),
    "yolo-nas in rows": ("yolo-nas", encodings.yolo_nas_flat),
    "yolo-nas in batches": ("yolo-nas", encodings.yolo_nas_batch),
    "yolo-obb": ("yolo-obb", encodings.yolo_obb),
    "yolo-obb of selected objects": ("yolo-obb", encodings.yolo_obb_nms),
    "yolo-obb with transposed rows": ("yolo-obb", partial(encodings.transposed, encode=encodings.yolo_obb)),
    "yolo-seg with transposed rows": ("yolo-seg", partial(encodings.transposed, encode=encodings.yolo_seg)),
    "yolo-seg": ("yolo-seg", encodings.yolo_seg),
    "yolo-seg of selected objects": ("yolo-seg", encodings.yolo_seg_nms),
    "yolov3": ("yolov3", encodings.yolov3),
    "yolov3-nms": ("yolov3-nms", encodings.yolov3_nms),
    "yolov5": ("yolov5", encodings.yolov5),
    "yolov5 in shares": ("yolov5", partial(encodings.yolov5, shares=True)),
    "yolov6": ("yolov5", encodings.yolov6),
    "yolov5-raw": ("yolov5-raw", encodings.yolov5_raw),
    "yolov5-raw in four axes": ("yolov5-raw", partial(encodings.yolov5_raw, axes=4)),
    "yolov5-raw after its sigmoid": ("yolov5-raw", partial(encodings.yolov5_raw, axes=4, sigmoid=True)),
    "yolov7-end2end": ("yolov7-end2end", encodings.yolov7_end2end),
    "yolov8": ("yolov8", encodings.yolov8),
    "yolov8 in shares": ("yolov8", partial(encodings.yolov8, shares=True)),
    "yolov8 with transposed rows": ("yolov8", partial(encodings.transposed, encode=encodings.yolov8)),
    "yolox decoded in the graph": ("yolov5", encodings.yolox_decoded),
    "yolov8-raw": ("yolov8-raw", encodings.yolov8_raw),
    "yolov8-raw of logits": ("yolov8-raw", partial(encodings.yolov8_raw, sigmoid=False)),
    "yolov8-raw in one output a level": ("yolov8-raw", partial(encodings.yolov8_raw, form="joined", sigmoid=False)),
    "yolov8-raw with sums": ("yolov8-raw", partial(encodings.yolov8_raw, form="sums")),
    "yolov8-raw with channels at the end": ("yolov8-raw", partial(encodings.yolov8_raw, last=True)),
    "yolox": ("yolox", encodings.yolox),
}
# Raw levels of four axes before their sigmoid are the same in YOLOv3 and YOLOv5. The scores of one row for each cell
# may begin with an objectness (YOLOX decoded in the graph) or with a class (YOLOv8 with transposed rows). Only the
# stated number of classes, the boxes on labelled images, or the user tell these pairs apart.
AMBIGUOUS = {
    "yolov3": {"yolov5-raw"},
    "yolov5-raw in four axes": {"yolov3"},
    "yolov8 with transposed rows": {"yolov5"},
    "yolox decoded in the graph": {"yolov8"},
}

# Frame → how an image of the model's size came about. All have one scale in both directions but the stretched one.
FRAMES = {
    "letterboxed": Frame.of(400, 400).resized(128, 128).placed(64, 0, SIZE),
    "stretched": Frame.of(500, 173).resized(*SIZE),
    "cropped": Frame.of(600, 400).resized(300, 200).placed(-22, -36, SIZE),
}


def find_fit(family: str, outputs: dict[str, np.ndarray], **facts: Any) -> Head:
    fit = load_family(family).fit(View(outputs, SIZE, **facts))
    assert fit is not None
    return Head(family, fit.outputs, fit.parameters)


def check(answer: Any, truth: Truth, boxes: np.ndarray) -> None:
    """Check that the answer has exactly the objects, with these boxes in pixels of the stored image."""
    order = np.argsort(-truth.scores)
    assert answer.classes.tolist() == truth.classes[order].tolist()
    np.testing.assert_allclose(answer.scores, truth.scores[order], atol=2e-3)
    np.testing.assert_allclose(answer.boxes, boxes[order], atol=0.5)


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("case", CASES)
def test_boxes_return_from_their_encoding(case: str, kind: str) -> None:
    family, encode = CASES[case]
    frame = FRAMES[kind]
    if load_family(family).task == "obb" and kind == "stretched":
        pytest.skip("a stretched rectangle is no rectangle")
    for seed in range(5):
        random = np.random.default_rng(seed)
        truth = draw_truth(random)
        outputs = encode(truth, random)
        answer = decode(outputs, find_fit(family, outputs), frame)
        corners = (truth.boxes.reshape(-1, 2, 2) - frame.offset) / frame.scale
        check(answer, truth, corners.reshape(-1, 4))
        if answer.angles is not None:
            np.testing.assert_allclose(answer.angles, truth.angles[np.argsort(-truth.scores)], atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_no_other_family_fits(case: str) -> None:
    family, encode = CASES[case]
    for seed in range(3):
        random = np.random.default_rng(seed)
        outputs = encode(draw_truth(random), random)
        fitting = {other.name for other in all_families() if other.fit(View(outputs, SIZE)) is not None}
        assert fitting == {family} | AMBIGUOUS.get(case, set())


def test_the_number_of_classes_decides() -> None:
    for case in ("yolov8 with transposed rows", "yolox decoded in the graph", "yolov5", "yolov6"):
        family, encode = CASES[case]
        random = np.random.default_rng(0)
        view = View(encode(draw_truth(random), random), SIZE, classes=encodings.CLASSES)
        assert [other.name for other in all_families() if other.fit(view) is not None] == [family]


def test_every_family_of_boxes_has_a_case() -> None:
    families = {f.name for f in all_families() if f.candidates is not None and f.task in ("detect", "obb")}
    # edgeq itself cuts graphs in front of the selection of pairs; tests of cuts cover that family.
    assert families - {"pairs"} <= {family for family, _ in CASES.values()}


@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        ("rtdetr-official", ("images", "orig_target_sizes")),
        ("paddle-detection", ("image", "im_shape", "scale_factor")),
        ("ppyoloe", ("image", "scale_factor")),
        ("yolov3-nms", ("input_1", "image_shape")),
    ],
)
def test_boxes_in_pixels_of_the_stored_image_are_not_mapped(case: str, inputs: tuple[str, ...]) -> None:
    family, encode = CASES[case]
    random = np.random.default_rng(1)
    truth = draw_truth(random)
    outputs = encode(truth, random)
    head = find_fit(family, outputs, inputs=inputs)
    assert set(head.parameters["inputs"]) == set(inputs[1:])
    check(decode(outputs, head, FRAMES["letterboxed"]), truth, truth.boxes)


def test_the_numbers_of_coco_have_gaps() -> None:
    """A label of 90 (toothbrush) is the last of 80 classes; labels without a class are dropped."""
    boxes = np.array([[0, 0, 20, 20], [40, 0, 60, 20], [80, 0, 99, 20]], np.float32)
    outputs = {"boxes": boxes, "labels": np.array([90, 1, 12]), "scores": np.float32([0.9, 0.8, 0.7])}
    answer = decode(outputs, find_fit("torchvision", outputs, classes=80), FRAMES["stretched"])
    assert answer.classes.tolist() == [79, 0]
    logits = np.full((1, 20, 91), -5.0, np.float32)
    logits[0, 3, 90] = logits[0, 4, 1] = 2.0
    pred_boxes = np.full((1, 20, 4), 0.25, np.float32)
    pred_boxes[..., 2] = 0.1
    for family, names in (("detr", ("pred_boxes", "logits")), ("rf-detr", ("dets", "labels"))):
        outputs = dict(zip(names, (pred_boxes, logits), strict=True))
        answer = decode(outputs, find_fit(family, outputs, classes=80), FRAMES["stretched"])
        assert sorted(answer.classes.tolist()) == [0, 79]


def test_an_image_without_objects_is_no_error() -> None:
    outputs = {
        "boxes": np.zeros((0, 4), np.float32),
        "labels": np.zeros(0, np.int64),
        "scores": np.zeros(0, np.float32),
    }
    assert len(decode(outputs, find_fit("torchvision", outputs), FRAMES["stretched"])) == 0


@pytest.mark.parametrize("anchors", ["yolov7", "12 16 19 36 40 28 36 75 76 55 72 146 142 110 192 243 459 401"])
def test_anchors_are_a_parameter(anchors: str) -> None:
    random = np.random.default_rng(0)
    outputs = encodings.yolov5_raw(draw_truth(random), random)
    head = find_fit("yolov5-raw", outputs)
    own = Head(head.family, head.outputs, {**head.parameters, "anchors": anchors})
    usual, changed = (decode(outputs, h, FRAMES["stretched"]) for h in (head, own))
    widths = [answer.boxes[:, 2] - answer.boxes[:, 0] for answer in (usual, changed)]
    assert set(np.round(widths[1] / widths[0], 2).tolist()) <= {round(40 / 33, 2), round(36 / 30, 2)}
