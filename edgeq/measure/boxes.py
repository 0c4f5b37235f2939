"""Boxes: overlap and non-maximum suppression.

A box is x1, y1, x2, y2 (left, top, right, bottom) in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Detections:
    """Boxes of one image: boxes float64 [N, 4], scores float64 [N], classes int64 [N]."""

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, which: NDArray[Any]) -> Detections:
        """Those at indices, or where a mask [N] holds."""
        return Detections(self.boxes[which], self.scores[which], self.classes[which])


def best_class(boxes: NDArray[Any], scores: NDArray[Any]) -> Detections:
    """Each box with its highest-scored class: boxes [N, 4], scores [N, classes]."""
    classes = scores.argmax(axis=1)
    return Detections(
        np.asarray(boxes, np.float64),
        np.asarray(scores[np.arange(len(scores)), classes], np.float64),
        classes.astype(np.int64),
    )


def centre_to_corners(boxes: NDArray[Any]) -> Floats:
    """Centre x, centre y, width, height → corners, [N, 4]."""
    centre, half = np.asarray(boxes[:, :2], np.float64), np.asarray(boxes[:, 2:4], np.float64) / 2
    return np.concatenate([centre - half, centre + half], axis=1)


def overlap(box: Floats, boxes: Floats) -> Floats:
    """Intersection over union of one box [4] with each of [N, 4]; 0 where the union has no area."""
    low = np.maximum(box[:2], boxes[:, :2])
    high = np.minimum(box[2:], boxes[:, 2:])
    common: Floats = np.clip(high - low, 0, None).prod(axis=1)
    union = areas(box[None]) + areas(boxes) - common
    shared: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return shared


def areas(boxes: Floats) -> Floats:
    """Areas [N]; 0 for a box turned inside out."""
    size: Floats = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None)
    area: Floats = size.prod(axis=1)
    return area


def nms(found: Detections, iou: float, limit: int) -> NDArray[np.int64]:
    """Indices of the detections to keep, best score first, at most `limit`.

    From the best down, one is kept unless it overlaps a kept one of the same class by more than `iou`. Of equal
    scores the earlier goes first.
    """
    order = np.argsort(-found.scores, kind="stable")
    boxes, classes = found.boxes[order], found.classes[order]
    left = np.arange(len(order))
    kept: list[int] = []
    while left.size and len(kept) < limit:
        first, remaining = left[0], left[1:]
        kept.append(int(order[first]))
        dropped = (classes[remaining] == classes[first]) & (overlap(boxes[first], boxes[remaining]) > iou)
        left = remaining[~dropped]
    return np.array(kept, np.int64)


def suppress(candidates: Detections, *, confidence: float, iou: float, limit: int) -> Detections:
    """What remains of a head's candidates: finite, scored above `confidence`, not suppressed, the best `limit`."""
    usable = np.isfinite(candidates.boxes).all(axis=1) & (candidates.scores > confidence)
    strong = candidates.take(usable)
    return strong.take(nms(strong, iou, limit))
