"""YuNet: faces with five points, without anchors, at several strides.

    for each stride 8, 16, 32: class score and object score [1, N, 1], box [1, N, 4], points [1, N, 10]

The score is the square root of class score times object score. With d for an output: centre = (d + cell) * stride,
width and height = exp(d) * stride, point = (d + cell) * stride, in pixels of the model's input. A cell's position is
its corner. Source: ShiqiYu/libfacedetection.train; OpenCV, modules/objdetect/src/face_detect.cpp.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.faces import group_levels, read_levels, with_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.points import FACE_POINTS


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the face of each cell."""
    level = read_levels(outputs, head, size, 1)
    cells, strides = level["cells"], level["strides"]
    scores = np.sqrt(np.clip(level["1"][:, 0], 0, 1) * np.clip(level["1b"][:, 0], 0, 1))
    boxes = np.concatenate([level["4"][:, :2] + cells, np.exp(level["4"][:, 2:])], axis=1) * strides
    points = (level["10"] + np.tile(cells, 5)) * strides
    return Objects(to_corners(boxes), scores, np.zeros(len(scores), np.int64), keypoints=with_scores(points, scores))


def fit(view: View) -> Optional[Fit]:
    """Accept levels of four outputs with one row for each cell."""
    roles = group_levels(view.outputs, view.size, (1, 1, 4, 10), 1)
    return Fit(roles) if roles and view.classes in (None, 1) else None


FAMILY = Family(
    "yunet",
    "pose",
    "for each stride two scores [1, N, 1], boxes [1, N, 4] and points [1, N, 10]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.6, "iou": 0.45, "limit": 300},
    keypoint_names=FACE_POINTS,
    preprocess="yunet",
)
