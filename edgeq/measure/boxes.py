"""Give the boxes of decoders that plug-ins and users write one unit.

The boxes themselves, their overlap and their suppression are in `edgeq_device.answers.objects`, because devices decode
with the same code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from edgeq_device.answers.objects import Objects
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Detections = Objects
"""The boxes of one image: boxes float64 [N, 4] as x1, y1, x2, y2 in pixels, scores float64 [N], classes int64 [N]."""

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
