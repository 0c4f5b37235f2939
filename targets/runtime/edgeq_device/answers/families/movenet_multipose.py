"""MoveNet (multipose): up to six people.

    rows [1, 6, 56]: y, x and score of 17 keypoints, then top, left, bottom, right and score of the person

Positions are shares of the input's size. Source: TensorFlow Hub, MoveNet MultiPose Lightning.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, to_pixels
from edgeq_device.answers.families.movenet import are_shares
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import COCO_POINTS

_COUNT = len(COCO_POINTS)
_COLUMNS = 3 * _COUNT + 5
_MOST_PEOPLE = 50


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the people."""
    rows = np.asarray(outputs[head.outputs["rows"]], np.float64).reshape(-1, _COLUMNS)
    points = rows[:, : 3 * _COUNT].reshape(-1, _COUNT, 3)
    place = to_pixels(points[..., 1::-1], "share", size)
    boxes = to_pixels(rows[:, [-4, -5, -2, -3]], "share", size)
    return Objects(
        boxes, rows[:, -1], np.zeros(len(rows), np.int64), keypoints=np.concatenate([place, points[..., 2:]], axis=-1)
    )


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, n, 56] of few rows, whose boxes are corners."""
    only = single_rows(view.outputs)
    if only is None or len(view.outputs) != 1:
        return None
    name, rows = only
    if rows.shape[1] != _COLUMNS or len(rows) > _MOST_PEOPLE or not are_shares(rows):
        return None
    corners = (rows[:, -3:-1] >= rows[:, -5:-3]).all()
    return (
        Fit({"rows": name}) if corners and are_scores(rows[:, 2::3][:, :_COUNT]) and are_scores(rows[:, -1]) else None
    )


FAMILY = Family(
    "movenet-multipose",
    "pose",
    "rows [1, 6, 56]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 50},
    keypoint_names=COCO_POINTS,
    preprocess="movenet",
)
