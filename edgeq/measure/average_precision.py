"""Compute COCO's mAP50-95 for many selections of the same images.

The detections of each image are matched with its objects only once. The result is the same as that of the COCO packages
(area "all", 100 detections per image), but the packages need half a second for each selection of 128 images. The rules
of the packages are:

- Detections are processed in order of their scores, the highest first. A detection takes the free object of its
  category that it overlaps most, if the overlap reaches the threshold.
- Several detections may take the same object if it is marked as crowd. These detections count neither as correct nor as
  wrong.
- The precision at each of 101 recalls is the highest precision at that recall or a higher one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.boxes import Floats

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
# COCO's packages use the square of 1e5 pixels as the upper limit of the area "all".
_LARGEST_AREA = 1e10
# COCO's packages lower a threshold of 1 to this value, so that rounding does not lose a perfect overlap.
_CERTAIN = 1 - 1e-10
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Matches:
    """Hold the matches between the detections of one category in one image and the objects of that category.

    Attributes:
        scores: scores of the detections, [D], descending.
        right: whether each detection took an object, [thresholds, D].
        ignored: whether each detection is left out of the count, [thresholds, D].
        objects: number of objects, without those marked as crowd.
    """

    scores: Floats
    right: Flags
    ignored: Flags
    objects: int


def match(boxes: Floats, scores: Floats, objects: Floats, crowd: Flags) -> Matches:
    """Match detections with objects of the same category in one image.

    Args:
        boxes: boxes of the detections, [D, 4] as x, y, width, height in pixels.
        scores: scores of the detections, [D].
        objects: boxes of the objects, [G, 4] in the same form.
        crowd: whether each object is marked as crowd, [G].
    """
    overlaps = _compute_overlaps(boxes, objects, crowd) if len(objects) else np.zeros((len(boxes), 0))
    return match_overlaps(overlaps, scores, boxes[:, 2] * boxes[:, 3], crowd)


def match_overlaps(overlaps: Floats, scores: Floats, areas: Floats, crowd: Flags) -> Matches:
    """Match detections with objects of the same category in one image, by their overlaps [D, G]: IoU or OKS.

    Args:
        scores, areas: scores of the detections, and their areas in square pixels, each [D].
        crowd: whether each object is marked as crowd or is to be ignored, [G].
    """
    # The packages sort stably too, which decides among equal scores.
    order = np.argsort(-scores, kind="stable")
    # Crowds come last, because a detection goes to a crowd only if no single object is free.
    crowd_order = np.argsort(crowd, kind="stable")
    scores, areas, crowd = scores[order], areas[order], crowd[crowd_order]
    overlaps = overlaps[order][:, crowd_order]
    right = np.zeros((len(THRESHOLDS), len(scores)), np.bool_)
    ignored = np.repeat(((areas < 0) | (areas > _LARGEST_AREA))[None], len(THRESHOLDS), axis=0)
    for row, threshold in enumerate(THRESHOLDS if (overlaps >= THRESHOLDS[0]).any() else ()):
        free = np.ones(len(crowd), np.bool_)
        # Most detections overlap no object, so only a few reach this slow loop.
        for d in np.flatnonzero((overlaps >= min(threshold, _CERTAIN)).any(axis=1)):
            usable = (overlaps[d] >= min(threshold, _CERTAIN)) & (free | crowd)
            if (usable & ~crowd).any():
                usable &= ~crowd
            if not usable.any():
                continue
            best = np.where(usable, overlaps[d], -1.0)
            best_object = len(best) - 1 - int(best[::-1].argmax())  # the last one among equal overlaps
            free[best_object] = False
            right[row, d], ignored[row, d] = not crowd[best_object], crowd[best_object]
    return Matches(scores, right, ignored, int((~crowd).sum()))


def mean_average_precisions(images: Sequence[Mapping[int, Matches]], selections: Flags) -> Floats:
    """Return the mAP50-95 of each selection of images, [choices]. It is NaN if the selected images have no object.

    Args:
        images: for each image, matches by category. Among equal scores, those of the earlier image come first.
        selections: whether each selection contains each image, [choices, images].
    """
    total, category_count = np.zeros(len(selections)), np.zeros(len(selections))
    for category in sorted({c for image in images for c in image}):
        matches = [(i, image[category]) for i, image in enumerate(images) if category in image]
        places = np.array([i for i, _ in matches])
        objects = selections[:, places].astype(np.int64) @ np.array([m.objects for _, m in matches])
        if objects.any():
            total += np.where(
                objects > 0, _average_precision([m for _, m in matches], selections[:, places], objects), 0.0
            )
            # A category without an object in a selection has no average precision, and does not count in its mean.
            category_count += objects > 0
    precision: Floats = np.divide(total, category_count, out=np.full(len(selections), np.nan), where=category_count > 0)
    return precision


def _average_precision(matches: Sequence[Matches], selections: Flags, objects: NDArray[np.int64]) -> Floats:
    """Return the average precision of one category for each selection, [choices]. It is the mean over the
    thresholds.
    """
    # The detections of all images share one ranking by score.
    order = np.argsort(-np.concatenate([m.scores for m in matches]), kind="stable")
    place = np.repeat(np.arange(len(matches)), [len(m.scores) for m in matches])[order]
    right = np.concatenate([m.right for m in matches], axis=1)[:, order]
    ignored = np.concatenate([m.ignored for m in matches], axis=1)[:, order]
    selected = selections[:, place]
    selected_count = np.cumsum(selected, axis=1)
    required = np.stack([_count_required(int(n)) for n in objects])
    total = np.zeros(len(selections))
    for took, dropped in zip(right, ignored, strict=True):
        at = np.flatnonzero(took)
        if not at.size:
            continue
        detection_count = np.cumsum(selected & ~dropped, axis=1) if dropped.any() else selected_count
        selected_hits = selected[:, at]
        count = np.cumsum(selected_hits, axis=1)
        # The packages add the same spacing, so the figures are equal to the last bit.
        precision = np.where(selected_hits, count / (detection_count[:, at] + np.spacing(1)), 0.0)
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # The best precision for each number of objects found so far; 0 for numbers that are never reached.
        by_count = np.zeros((len(selections), max(int(objects.max()), at.size) + 1))
        rows, columns = np.nonzero(selected_hits)
        by_count[rows, count[rows, columns]] = best[rows, columns]
        total += np.take_along_axis(by_count, required, axis=1).mean(axis=1)
    return total / len(right)


@cache
def _count_required(objects: int) -> NDArray[np.int64]:
    """Return, for each of the 101 recalls, how many of `objects` must be found. The number is at least one."""
    if not objects:
        return np.ones(len(_RECALLS), np.int64)
    # Also a recall of 0 asks for one correct detection: the packages take the best precision of all there.
    return np.maximum(np.searchsorted(np.arange(objects + 1) / objects, _RECALLS), 1)


def _compute_overlaps(boxes: Floats, objects: Floats, crowd: Flags) -> Floats:
    """Return the intersection over union of each detection with each object, [D, G]. For an object marked as crowd, the
    detection's own area replaces the union.
    """
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], objects[None, :, :2] + objects[None, :, 2:])
    size = high - low
    common = np.where((size > 0).all(axis=2), size.prod(axis=2), 0.0)
    box_areas, object_areas = boxes[:, 2] * boxes[:, 3], objects[:, 2] * objects[:, 3]
    union = np.where(crowd[None], box_areas[:, None], box_areas[:, None] + object_areas[None] - common)
    ratios: NDArray[Any] = np.divide(common, union, out=np.zeros_like(common), where=union != 0)
    return ratios
