"""State how exactly people place the keypoints of an object, for COCO's similarity of keypoints."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# COCO's 17 points of a person, from the nose to the ankles, in hundredths.
_PERSON = (2.6, 2.5, 2.5, 3.5, 3.5, 7.9, 7.9, 7.2, 7.2, 6.2, 6.2, 10.7, 10.7, 8.7, 8.7, 8.9, 8.9)


def find_sigmas(count: int) -> Floats:
    """Return sigma of each of `count` keypoints: COCO's for 17, else 1 / count for all, as Ultralytics validates."""
    return np.array(_PERSON) / 100 if count == len(_PERSON) else np.full(count, 1 / max(count, 1))
