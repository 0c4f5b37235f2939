"""YOLOv8 and 11 with rotated boxes, decoded in the graph.

    rows [1, 4 + C + 1, N]: centre x, centre y, width, height, class scores after their sigmoid, angle in radians

The box is given in the frame of its own rotation; the angle is -pi/4 to 3 pi/4, clockwise. Boxes are suppressed by
their probabilistic IoU. Source: Ultralytics, nn/modules/head.py, class OBB.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.families.yolov8 import read_rows
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row, with the row's angle."""
    rows = read_rows(outputs, head.outputs["rows"])
    if rows.shape[1] < 6:
        raise ValueError("a row has fewer than 6 columns")
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return pick_best_class(to_corners(boxes), rows[:, 4:-1], angles=rows[:, -1])


def are_angles(values: Any) -> bool:
    """Return whether values [N] can be angles, and cannot be scores."""
    inside = values.size and values.min() >= -np.pi / 4 - 0.01 and values.max() <= 3 * np.pi / 4 + 0.01
    return bool(inside) and not are_scores(values)


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, 5 + C, N] whose last row is angles."""
    only = single_rows(view.outputs)
    if only is None or len(view.outputs) != 1:
        return None
    name, array = only
    if not 6 <= len(array) < array.shape[1] or view.classes not in (None, len(array) - 5):
        return None
    if not view.forced and (not are_scores(array[4:-1]) or array[2:4].min() < 0 or not are_angles(array[-1])):
        return None
    return Fit({"rows": name}, state_unit(array[:4].T))


FAMILY = Family(
    "yolo-obb",
    "obb",
    "rows [1, 4 + classes + 1, N]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    preprocess="yolo",
    rotated=True,
)
