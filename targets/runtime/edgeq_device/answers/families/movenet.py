"""MoveNet (single pose): the pose of one person anywhere in the image.

    points [1, 1, 17, 3]: y, x and score of each keypoint; positions are shares of the input's size

The person's box encloses the keypoints that score above 0.2, or all if none does. Source: TensorFlow Hub, MoveNet.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import COCO_POINTS, enclose_person

# MoveNet's own crop counts keypoints above this score.
_VISIBLE = 0.2
_REACH = 1.0


def are_shares(points: Any) -> bool:
    """Return whether positions can be shares of the input's size. A person may reach out of the image."""
    return bool(np.isfinite(points).all() and points.min() >= -_REACH and points.max() <= 1 + _REACH)


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the person."""
    points = np.asarray(outputs[head.outputs["points"]], np.float64)
    if points.shape != (1, 1, len(COCO_POINTS), 3):
        raise ValueError("the points are not [1, 1, 17, 3]")
    place, scores = to_pixels(points[0, 0, :, 1::-1], "share", size), points[0, 0, :, 2]
    visible = place[scores > _VISIBLE] if (scores > _VISIBLE).any() else place
    return enclose_person(np.column_stack([place, scores]), (*visible.min(axis=0), *visible.max(axis=0)))


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, 1, 17, 3] of shares and scores."""
    ((name, array),) = view.outputs.items() if len(view.outputs) == 1 else (("", np.zeros(0)),)
    if array.shape != (1, 1, len(COCO_POINTS), 3) or array.dtype.kind != "f":
        return None
    return Fit({"points": name}) if are_shares(array[..., :2]) and are_scores(array[..., 2]) else None


FAMILY = Family(
    "movenet",
    "pose",
    "points [1, 1, 17, 3] as y, x, score",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.2, "limit": 1},
    keypoint_names=COCO_POINTS,
    preprocess="movenet",
)
