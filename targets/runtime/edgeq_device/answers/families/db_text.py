"""Text detection by differentiable binarization (DB), such as PP-OCR's: the regions of a probability map.

    probability [1, 1, h, w] or [1, h, w]: of each pixel to be inside a line of text

Pixels above the threshold "pixel" form regions. Each region's smallest rotated rectangle is scored by the mean
probability inside, and grown on each side by area * unclip / perimeter, because the model learns shrunk regions. The
polygons are these rectangles in pixels of the stored image. Sources: M. Liao et al., "Real-time Scene Text Detection
with Differentiable Binarization", 2020; PaddleOCR, ppocr/postprocess/db_postprocess.py.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from edgeq_device.answers.answer import Answer
from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.contours import label_regions
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.raster import find_frame, find_single_maps, read_single
from edgeq_device.answers.rectangles import find_rectangle
from edgeq_device.prepare.frame import Frame

# PaddleOCR drops thinner regions. The second limit applies to the grown rectangle.
_THINNEST, _THINNEST_GROWN = 3, 5
# What a page of text shows: so many regions, of which this share are lines, that fill so much of their rectangles.
_LEAST_REGIONS, _MOSTLY, _FILLED = 4, 0.7, 0.7


def decode(outputs: Outputs, head: Head, frame: Frame) -> Answer:
    """Return the regions of text, best score first: their polygons [N, 4, 2], and the upright boxes around these."""
    values = np.asarray(read_single(outputs[head.outputs["probability"]]), np.float64)
    thresholds = {**FAMILY.thresholds, **head.thresholds}
    frame = find_frame(frame, values)
    to_input = np.array(frame.size) / values.shape[::-1]
    polygons, scores = [], []
    for points in _split_regions(values > thresholds["pixel"]):
        rectangle = find_rectangle(points + 0.5)
        score = _mean_inside(values, rectangle.grown(1e-6))
        rectangle = rectangle.grown(_find_rim(2 * rectangle.half, len(points)))
        sides = 2 * rectangle.half
        if sides.min() < _THINNEST:
            continue
        grown = rectangle.grown(sides.prod() * thresholds["unclip"] / (2 * sides.sum()))
        if score >= thresholds["confidence"] and 2 * grown.half.min() >= _THINNEST_GROWN:
            polygons.append(frame.to_original(grown.corners * to_input))
            scores.append(score)
    order = np.argsort(-np.array(scores), kind="stable")[: int(thresholds["limit"])]
    corners = np.array(polygons, np.float64).reshape(-1, 4, 2)[order]
    return Answer(
        "text-detect",
        boxes=np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1),
        scores=np.array(scores, np.float64)[order],
        classes=np.zeros(len(order), np.int64),
        polygons=corners,
    )


def _split_regions(mask: Any) -> Any:
    """Return the pixels [N, 2], as x and y, of each region."""
    labels, count = label_regions(mask)
    y, x = np.nonzero(labels)
    numbers = labels[y, x]
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=count + 1)[1:])
    return np.split(np.stack([x, y], axis=1)[order].astype(np.float64), ends)[:-1]


def _find_rim(sides: Any, area: int) -> float:
    """Return by how much the pixels reach over the rectangle around their centres, from 0 to half a pixel: with it, a
    rectangular region has the area of its pixels, at any angle. Regions with round ends have less.
    """
    spare = float(sides.sum()) ** 2 - 4 * (float(sides.prod()) - area)
    return float(np.clip((np.sqrt(spare) - sides.sum()) / 4, 0, 0.5))


def _mean_inside(values: Any, rectangle: Any) -> float:
    corners = rectangle.corners
    low = np.maximum(np.floor(corners.min(axis=0)).astype(int), 0)
    high = np.minimum(np.ceil(corners.max(axis=0)).astype(int), values.shape[::-1])
    y, x = np.mgrid[low[1] : high[1], low[0] : high[0]]
    inside = rectangle.contains(np.stack([x.ravel(), y.ravel()], axis=1) + 0.5)
    return float(values[low[1] : high[1], low[0] : high[0]].ravel()[inside].mean()) if inside.any() else 0.0


def fit(view: View) -> Optional[Fit]:
    """Accept the only output if it is a map of probabilities, and the family is named or the map shows lines of text.
    Alpha and masks look alike, but their regions are few or have other forms.
    """
    maps = [name for name, array in find_single_maps(view.outputs).items() if are_scores(array)]
    if len(maps) != 1 or len(view.outputs) != 1:
        return None
    return Fit({"probability": maps[0]}) if view.named or _shows_lines(view.outputs[maps[0]]) else None


def _shows_lines(array: Any) -> bool:
    """Return whether a map has several regions, and most of them are filled rectangles at least twice as long as
    high.
    """
    values = np.asarray(read_single(array), np.float64)
    lines, count = 0, 0
    for points in _split_regions(values > FAMILY.thresholds["pixel"]):
        sides = 2 * find_rectangle(points + 0.5).grown(0.5).half
        if sides.min() >= _THINNEST:
            count += 1
            lines += bool(sides.max() >= 2 * sides.min() and len(points) >= _FILLED * sides.prod())
    return count >= _LEAST_REGIONS and lines >= _MOSTLY * count


FAMILY = Family(
    "db-text",
    "text-detect",
    "probability [1, 1, h, w]",
    fit,
    decode=decode,
    thresholds={"pixel": 0.3, "confidence": 0.6, "unclip": 1.5, "limit": 1000},
    preprocess="ppocr-det",
)
