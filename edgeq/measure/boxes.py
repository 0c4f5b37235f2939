"""Represent detected boxes: their unit, their overlap, and the suppression of overlapping ones.

A box is x1, y1, x2, y2 (left, top, right, bottom) in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Detections:
    """Hold the boxes of one image: boxes float64 [N, 4], scores float64 [N], classes int64 [N]."""

    boxes: Floats
    scores: Floats
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, selection: NDArray[Any]) -> Detections:
        """Return the detections at some indices, or those for which a mask [N] is true."""
        return Detections(self.boxes[selection], self.scores[selection], self.classes[selection])


def pick_best_class(boxes: NDArray[Any], scores: NDArray[Any]) -> Detections:
    """Return each box with its highest-scoring class. `boxes` is [N, 4] and `scores` [N, classes]."""
    classes = scores.argmax(axis=1)
    return Detections(
        np.asarray(boxes, np.float64),
        np.asarray(scores[np.arange(len(scores)), classes], np.float64),
        classes.astype(np.int64),
    )


def convert_to_corners(boxes: NDArray[Any]) -> Floats:
    """Convert boxes [N, 4] from (centre x, centre y, width, height) to corners."""
    centre, half = np.asarray(boxes[:, :2], np.float64), np.asarray(boxes[:, 2:4], np.float64) / 2
    return np.concatenate([centre - half, centre + half], axis=1)


BoxUnit = Literal["pixels", "shares", "pixels, scaled"]
"""Unit of decoded boxes: pixels of the model's input, shares of its width and height, or pixels that a decoder for
shares has multiplied by the size.
"""
# Shares are at most 1, apart from boxes that reach over the edge. Boxes in pixels reach much further than two pixels.
_LARGEST_SHARE = 2.0
# Boxes whose median reaches further than this many widths or heights of the image are not in pixels.
_FAR_OUTSIDE = 8.0
# On smaller inputs, boxes in pixels hardly reach further than shares do.
_SMALLEST_SIDE = 16


def find_box_unit(boxes: NDArray[Any], size: tuple[int, int]) -> BoxUnit | None:
    """Return the unit of the decoded boxes [N, 4] of one image. The model's input has `size` (width, height) in pixels.

    Return None if no box shows the unit: there are none, or all are empty.
    """
    # Infinite boxes come from the exponents of a raw head, and do not show its unit.
    reach = np.abs(np.asarray(boxes, np.float64)[np.isfinite(boxes).all(axis=1)]).reshape(-1, 2, 2).max(axis=1)
    if min(size) < _SMALLEST_SIDE or not reach.any():
        return None
    if reach.max() <= _LARGEST_SHARE:
        return "shares"
    # The median, because single boxes of a right decoder may reach far outside the image too.
    return "pixels, scaled" if np.median((reach / size).max(axis=1)) > _FAR_OUTSIDE else "pixels"


def in_pixels(detections: Detections, unit: BoxUnit, size: tuple[int, int]) -> Detections:
    """Return detections with boxes in pixels of the model's input, whose `size` is (width, height)."""
    if unit == "pixels":
        return detections
    factor = np.tile(np.asarray(size, np.float64), 2)
    boxes = detections.boxes * factor if unit == "shares" else detections.boxes / factor
    return replace(detections, boxes=boxes)


def compute_overlap(box: Floats, boxes: Floats) -> Floats:
    """Return the intersection over union of one box [4] with each of the boxes [N, 4]. Return 0 if the union has no
    area.

    A box whose corners are swapped has no area.
    """
    edges = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    sizes = (high - low for low, high in (edges, (box[:2], box[2:]), (boxes[:, :2], boxes[:, 2:])))
    common, box_area, areas = (np.clip(size, 0, None).prod(axis=-1) for size in sizes)
    union = box_area + areas - common
    ratios: Floats = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return ratios


def suppress_overlaps(detections: Detections, iou: float, limit: int) -> NDArray[np.int64]:
    """Return the indices of the detections to keep, in descending order of score, at most `limit`.

    The detections are processed in this order. A detection is kept unless it overlaps a kept detection of the same
    class by more than `iou`. Of detections with equal scores, the earlier one comes first.
    """
    order = np.argsort(-detections.scores, kind="stable")
    boxes, classes = detections.boxes[order], detections.classes[order]
    pending = np.arange(len(order))
    kept_indices: list[int] = []
    # Each round removes what the best pending box suppresses, so a suppressed box suppresses nothing itself.
    while pending.size and len(kept_indices) < limit:
        best, remaining = pending[0], pending[1:]
        kept_indices.append(int(order[best]))
        dropped = (classes[remaining] == classes[best]) & (compute_overlap(boxes[best], boxes[remaining]) > iou)
        pending = remaining[~dropped]
    return np.array(kept_indices, np.int64)


def suppress(candidates: Detections, *, confidence: float, iou: float, limit: int) -> Detections:
    """Return the best candidates of a detector head, at most `limit`.

    The returned candidates are finite, have a score above `confidence`, and are not suppressed by other candidates
    (`suppress_overlaps`).
    """
    usable = np.isfinite(candidates.boxes).all(axis=1) & (candidates.scores > confidence)
    strong = candidates.take(usable)
    return strong.take(suppress_overlaps(strong, iou, limit))
