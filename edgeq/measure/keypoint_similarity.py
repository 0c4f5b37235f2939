"""Compute the object keypoint similarity (OKS): how close the keypoints of two objects are.

    OKS = mean over the visible keypoints of exp(-d^2 / (2 area (2 sigma)^2))

d is the distance in pixels, the area is that of the object in square pixels. sigma tells how exactly people place a
keypoint. Source: COCO's keypoint evaluation (cocoapi, cocoeval.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# COCO's 17 points of a person, from the nose to the ankles, in hundredths.
_PERSON = (2.6, 2.5, 2.5, 3.5, 3.5, 7.9, 7.9, 7.2, 7.2, 6.2, 6.2, 10.7, 10.7, 8.7, 8.7, 8.9, 8.9)
BOX_SHARE = 0.53
"""Share of a person's box that the person fills, for objects of which only the box is known (Ultralytics)."""


def find_sigmas(count: int) -> Floats:
    """Return sigma of each of `count` keypoints: COCO's for 17, else 1 / count for all, as Ultralytics validates."""
    return np.array(_PERSON) / 100 if count == len(_PERSON) else np.full(count, 1 / max(count, 1))


def compute_similarity(points: NDArray[Any], others: NDArray[Any], visible: NDArray[np.bool_], area: float) -> float:
    """Return the OKS of points [K, 2] and others [K, 2] in pixels over the visible [K] keypoints, from 0 to 1.

    Return 0 if no keypoint is visible.
    """
    if not visible.any():
        return 0.0
    squared = ((np.asarray(points, np.float64) - others) ** 2).sum(axis=1)
    # A point nowhere is infinitely far away.
    squared = np.where(np.isfinite(squared), squared, np.inf)
    # COCO adds the same number, so that an object without an area divides by something.
    scale = 2 * (area + np.spacing(1)) * (2 * find_sigmas(len(visible))) ** 2
    return float(np.exp(-squared[visible] / scale[visible]).mean())
