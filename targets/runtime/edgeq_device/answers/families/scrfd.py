"""SCRFD: faces, with or without five points, with two anchors in each cell at several strides.

    for each stride 8, 16, 32: scores [1, N, 1] after their sigmoid, distances [1, N, 4], and points [1, N, 10]

The batch axis may be absent. The anchors of a cell follow each other, and both have the cell's corner as their centre.
left, top, right and bottom are distances from it, points are offsets, both times the stride, in pixels of the model's
input. Names are often numbers. Source: deepinsight/insightface, detection/scrfd/tools/scrfd.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.faces import group_levels, read_levels, with_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import FACE_POINTS

_ANCHORS = 2
_STRONGEST = 10


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the face of each anchor."""
    level = read_levels(outputs, head, size, _ANCHORS)
    centres, distances = level["cells"] * level["strides"], level["4"] * level["strides"]
    boxes = np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)
    scores, classes = level["1"][:, 0], np.zeros(len(boxes), np.int64)
    if "10" not in level:
        return Objects(boxes, scores, classes)
    points = level["10"] * level["strides"] + np.tile(centres, 5)
    return Objects(boxes, scores, classes, keypoints=with_scores(points, scores))


def fit(view: View) -> Optional[Fit]:
    """Accept levels of two or three outputs with two rows for each cell, where the strongest distances are positive."""
    roles = group_levels(view.outputs, view.size, (1, 4, 10), _ANCHORS)
    roles = roles or group_levels(view.outputs, view.size, (1, 4), _ANCHORS)
    if roles is None or view.classes not in (None, 1):
        return None
    level = read_levels(view.outputs, Head("scrfd", roles), view.size, _ANCHORS)
    strongest = level["4"][np.argsort(-level["1"][:, 0], kind="stable")[:_STRONGEST]]
    return Fit(roles) if view.forced or (strongest[:, :2] + strongest[:, 2:] > 0).all() else None


FAMILY = Family(
    "scrfd",
    "pose",
    "for each stride scores [1, N, 1], distances [1, N, 4] and points [1, N, 10]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "iou": 0.4, "limit": 300},
    keypoint_names=FACE_POINTS,
    preprocess="scrfd",
)
