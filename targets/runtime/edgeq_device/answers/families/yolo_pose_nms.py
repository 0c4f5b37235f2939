"""YOLO models with keypoints whose objects the graph has selected: YOLO26, and exports with suppression inside.

    rows [1, N, 6 + v K]: left, top, right, bottom, score, class, then x, y and (if v is 3) visibility of K keypoints

Rows that fill up have low scores or are zero. Positions are in pixels of the model's input, or shares of its size.
Source: Ultralytics, engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, find_unit, single_rows, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.points import COCO_POINTS, lie_near, read_points
from edgeq_device.answers.rows import are_numbers, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows with their keypoints."""
    rows, unit = np.asarray(outputs[head.outputs["rows"]], np.float64), head.parameters.get("unit", "pixel")
    if rows.ndim != 3 or len(rows) != 1 or rows.shape[2] < 8:
        raise ValueError("the rows are not [1, N, 6 + 3 K]")
    rows = rows[0]
    points = read_points(rows[:, 6:], int(head.parameters["keypoints"]), unit, size)
    boxes = to_pixels(rows[:, :4], unit, size)
    return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters, keypoints=points)


def fit(view: View) -> Optional[Fit]:
    """Accept one output of corners, scores, whole class numbers, and keypoints near the boxes."""
    only = single_rows(view.outputs)
    if only is None or len(view.outputs) != 1:
        return None
    name, rows = only
    count, values = view.keypoints or ((rows.shape[1] - 6) // 3, 3)
    if count < 1 or values not in (2, 3) or rows.shape[1] != 6 + count * values:
        return None
    points = rows[:, 6:].reshape(len(rows), count, values)
    if not view.forced:
        classes = rows[:, 5]
        if not are_scores(rows[:, 4]) or not are_numbers(classes):
            return None
        if (view.classes or np.inf) <= classes.max() or (values == 3 and not are_scores(points[..., 2])):
            return None
        real = rows[:, 4] > 0
        if (rows[:, 2:4] < rows[:, :2])[real].any() or not lie_near(rows[:, :4], rows[:, 4], points):
            return None
    unit = {"unit": "share"} if rows[:, :4].any() and find_unit(rows[:, :4]) == "share" else {}
    return Fit({"rows": name}, {"keypoints": count, **unit})


FAMILY = Family(
    "yolo-pose-nms",
    "pose",
    "rows [1, N, 6 + 3 K]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
    keypoint_names=COCO_POINTS,
    preprocess="yolo",
)
