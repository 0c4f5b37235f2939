"""COCO's mAP50-95 over many choices of the same images: detections are matched with objects once, an image at a time.

It is what the COCO packages compute (area "all", 100 detections an image), which take half a second for each choice of
128 images. Their rules: detections from the best score down, each takes the free object of its category that it
overlaps most, at least by the threshold; an object marked as crowd may be taken by many, and who takes it counts
neither as right nor as wrong. Precision at 101 recalls is the best at that recall or a higher one.
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
_LARGEST_AREA = 1e10
_CERTAIN = 1 - 1e-10

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Matches:
    """Detections of one category in one image against its objects.

    Attributes:
        scores: of the detections, [D], descending.
        right: whether a detection took an object, [thresholds, D].
        ignored: whether it does not count, [thresholds, D].
        objects: how many objects count.
    """

    scores: Floats
    right: Flags
    ignored: Flags
    objects: int


def match(boxes: Floats, scores: Floats, objects: Floats, crowd: Flags) -> Matches:
    """Match detections with objects of the same category in one image.

    Args:
        boxes: [D, 4] x, y, width, height in pixels; `scores` [D].
        objects: [G, 4], as `boxes`; `crowd` [G].
    """
    order = np.argsort(-scores, kind="stable")
    boxes, scores = boxes[order], scores[order]
    last = np.argsort(crowd, kind="stable")
    objects, crowd = objects[last], crowd[last]
    area = boxes[:, 2] * boxes[:, 3]
    right = np.zeros((len(THRESHOLDS), len(boxes)), np.bool_)
    ignored = np.repeat(((area < 0) | (area > _LARGEST_AREA))[None], len(THRESHOLDS), axis=0)
    overlaps = _overlaps(boxes, objects, crowd) if len(objects) else np.zeros((len(boxes), 0))
    for row, threshold in enumerate(THRESHOLDS if (overlaps >= THRESHOLDS[0]).any() else ()):
        free = np.ones(len(objects), np.bool_)
        for d in np.flatnonzero((overlaps >= min(threshold, _CERTAIN)).any(axis=1)):
            usable = (overlaps[d] >= min(threshold, _CERTAIN)) & (free | crowd)
            if (usable & ~crowd).any():
                usable &= ~crowd
            if not usable.any():
                continue
            best = np.where(usable, overlaps[d], -1.0)
            taken = len(best) - 1 - int(best[::-1].argmax())  # of equal overlaps the last
            free[taken] = False
            right[row, d], ignored[row, d] = not crowd[taken], crowd[taken]
    return Matches(scores, right, ignored, int((~crowd).sum()))


def mean_average_precisions(images: Sequence[Mapping[int, Matches]], chosen: Flags) -> Floats:
    """mAP50-95 of each choice of images, [choices]; NaN where the images chosen have no object.

    Args:
        images: matches by category; of equal scores those of the earlier image come first.
        chosen: [choices, images].
    """
    total, counted = np.zeros(len(chosen)), np.zeros(len(chosen))
    for category in sorted({c for image in images for c in image}):
        found = [(i, image[category]) for i, image in enumerate(images) if category in image]
        places = np.array([i for i, _ in found])
        objects = chosen[:, places].astype(np.int64) @ np.array([m.objects for _, m in found])
        if objects.any():
            total += np.where(objects > 0, _average_precision([m for _, m in found], chosen[:, places], objects), 0.0)
            counted += objects > 0
    precision: Floats = np.divide(total, counted, out=np.full(len(chosen), np.nan), where=counted > 0)
    return precision


def _average_precision(found: Sequence[Matches], chosen: Flags, objects: NDArray[np.int64]) -> Floats:
    """Average precision of one category, mean over the thresholds, [choices]."""
    order = np.argsort(-np.concatenate([m.scores for m in found]), kind="stable")
    place = np.repeat(np.arange(len(found)), [len(m.scores) for m in found])[order]
    right = np.concatenate([m.right for m in found], axis=1)[:, order]
    ignored = np.concatenate([m.ignored for m in found], axis=1)[:, order]
    there = chosen[:, place]
    every = np.cumsum(there, axis=1)
    needed = np.stack([_needed(int(n)) for n in objects])
    total = np.zeros(len(chosen))
    for took, dropped in zip(right, ignored, strict=True):
        at = np.flatnonzero(took)
        if not at.size:
            continue
        seen = np.cumsum(there & ~dropped, axis=1) if dropped.any() else every
        here = there[:, at]
        count = np.cumsum(here, axis=1)
        precision = np.where(here, count / (seen[:, at] + np.spacing(1)), 0.0)
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        # By the number of objects found so far; 0 where so many are never found.
        by_count = np.zeros((len(chosen), max(int(objects.max()), at.size) + 1))
        rows, columns = np.nonzero(here)
        by_count[rows, count[rows, columns]] = best[rows, columns]
        total += np.take_along_axis(by_count, needed, axis=1).mean(axis=1)
    return total / len(THRESHOLDS)


@cache
def _needed(objects: int) -> NDArray[np.int64]:
    """How many of `objects` must be found for each of the 101 recalls, at least one."""
    if not objects:
        return np.ones(len(_RECALLS), np.int64)
    return np.maximum(np.searchsorted(np.arange(objects + 1) / objects, _RECALLS), 1)


def _overlaps(boxes: Floats, objects: Floats, crowd: Flags) -> Floats:
    """Intersection over union [D, G]; over the detection's own area where the object is a crowd."""
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], objects[None, :, :2] + objects[None, :, 2:])
    size = high - low
    common = np.where((size > 0).all(axis=2), size.prod(axis=2), 0.0)
    own, others = boxes[:, 2] * boxes[:, 3], objects[:, 2] * objects[:, 3]
    union = np.where(crowd[None], own[:, None], own[:, None] + others[None] - common)
    shared: NDArray[Any] = np.divide(common, union, out=np.zeros_like(common), where=union != 0)
    return shared
