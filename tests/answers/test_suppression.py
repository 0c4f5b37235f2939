from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edgeq_device.answers.objects import compute_iou, pick_best_class, suppress, to_corners
from hypothesis import given
from hypothesis import strategies as st

from edgeq.measure.boxes import Detections

# Whole numbers and few scores often give touching boxes, equal boxes and ties.
corner = st.integers(0, 8)


@st.composite
def detections(draw: st.DrawFn) -> Detections:
    box = st.tuples(corner, corner, st.integers(0, 5), st.integers(0, 5))
    drawn = draw(st.lists(st.tuples(box, st.integers(0, 4), st.integers(0, 2)), max_size=12))
    boxes = np.array([(x, y, x + w, y + h) for (x, y, w, h), _, _ in drawn], np.float64).reshape(-1, 4)
    scores = np.array([s / 4 for _, s, _ in drawn], np.float64)
    return Detections(boxes, scores, np.array([c for _, _, c in drawn], np.int64))


def plain_overlap(a: list[float], b: list[float]) -> float:
    """Return the overlap of two boxes by counting unit squares."""

    def squares(box: list[float]) -> set[tuple[int, int]]:
        return {(x, y) for x in range(int(box[0]), int(box[2])) for y in range(int(box[1]), int(box[3]))}

    either = squares(a) | squares(b)
    return len(squares(a) & squares(b)) / len(either) if either else 0.0


def plain_nms(candidates: Detections, iou: float, limit: int) -> list[int]:
    indices: list[int] = []
    for i in sorted(range(len(candidates)), key=lambda i: (-candidates.scores[i], i)):
        rivals = [k for k in indices if candidates.classes[k] == candidates.classes[i]]
        if all(plain_overlap(candidates.boxes[k].tolist(), candidates.boxes[i].tolist()) <= iou for k in rivals):
            indices.append(i)
    return indices[:limit]


@given(detections(), st.sampled_from([0.0, 0.3, 0.5, 0.65, 1.0]), st.integers(1, 12))
def test_nms_equals_brute_force(candidates: Detections, iou: float, limit: int) -> None:
    numbered = replace(candidates, coefficients=np.arange(len(candidates))[:, None])
    indices = suppress(numbered, -1.0, iou, limit).coefficients[:, 0]
    assert indices.tolist() == plain_nms(candidates, iou, limit)


@given(detections())
def test_overlap_equals_counting_squares(candidates: Detections) -> None:
    for box in candidates.boxes:
        expected = [plain_overlap(box.tolist(), peer.tolist()) for peer in candidates.boxes]
        np.testing.assert_allclose(compute_iou(box, candidates.boxes), expected, rtol=1e-12)


def test_boxes_of_other_classes_do_not_suppress() -> None:
    box = np.array([[0.0, 0.0, 4.0, 4.0]] * 2)
    one_class = Detections(box, np.array([0.9, 0.8]), np.array([1, 1]))
    two_classes = Detections(box, np.array([0.9, 0.8]), np.array([1, 2]))
    assert suppress(one_class, 0.0, 0.5, 10).scores.tolist() == [0.9]
    assert suppress(two_classes, 0.0, 0.5, 10).scores.tolist() == [0.9, 0.8]


def test_suppress_drops_the_weak_and_the_infinite() -> None:
    boxes = np.array([[0, 0, 1, 1], [5, 5, 9, 9], [0, 0, np.inf, 1], [20, 20, 21, 21]], np.float64)
    candidates = Detections(boxes, np.array([0.01, 0.5, 0.9, np.nan]), np.zeros(4, np.int64))
    detections = suppress(candidates, confidence=0.01, iou=0.5, limit=10)
    assert detections.scores.tolist() == [0.5]
    assert detections.boxes.tolist() == [[5, 5, 9, 9]]


def test_best_class_and_corners() -> None:
    detections = pick_best_class(np.zeros((2, 4)), np.array([[0.1, 0.7], [0.6, 0.2]], np.float32))
    assert detections.classes.tolist() == [1, 0]
    assert detections.scores.tolist() == pytest.approx([0.7, 0.6])
    assert to_corners(np.array([[5.0, 6.0, 4.0, 2.0]])).tolist() == [[3.0, 5.0, 7.0, 7.0]]
