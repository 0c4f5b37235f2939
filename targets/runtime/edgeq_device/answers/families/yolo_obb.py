"""YOLOv8, 11 and 26 with rotated boxes, decoded in the graph.

    rows [1, 4 + C + 1, N]: centre x, centre y, width, height, class scores after their sigmoid, angle
    rows [1, N, 7]: centre x, centre y, width, height, score, class, angle; the graph has selected the objects

The box is given in the frame of its own rotation; the angle is in radians, clockwise. Boxes are suppressed by their
probabilistic IoU. Source: Ultralytics, nn/modules/head.py, class OBB; engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.families.yolov8 import read_rows
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import are_numbers, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row, with the row's angle."""
    name, selected = head.outputs["rows"], head.parameters.get("selected")
    rows = drop_batch(outputs[name], 2) if selected else read_rows(outputs, name)
    if rows.shape[1] < 6:
        raise ValueError("a row has fewer than 6 columns")
    boxes = to_corners(to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size))
    if selected:
        return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters, angles=rows[:, 6])
    return pick_best_class(boxes, rows[:, 4:-1], angles=rows[:, -1])


def fit(view: View) -> Optional[Fit]:
    """Accept one output whose last column is angles, -pi/4 to 3 pi/4, and not scores."""
    only = single_rows(view.outputs)
    if only is None or len(view.outputs) != 1:
        return None
    name, array = only
    selected = array.shape[1] == 7 and are_scores(array[:, 4]) and are_numbers(array[:, 5])
    rows = array if selected or len(array) > array.shape[1] else array.T
    if not selected and (not 6 <= rows.shape[1] < len(rows) or view.classes not in (None, rows.shape[1] - 5)):
        return None
    turned = np.abs(rows[:, -1] - np.pi / 4).max(initial=0) <= np.pi / 2 + 0.01
    if not view.forced and (not turned or rows[:, 2:4].min(initial=0) < 0):
        return None
    if not (view.forced or selected or (are_scores(rows[:, 4:-1]) and not are_scores(rows[:, -1]))):
        return None
    return Fit({"rows": name}, {**state_unit(rows[:, :4]), **({"selected": True} if selected else {})})


FAMILY = Family(
    "yolo-obb",
    "obb",
    "rows [1, 4 + classes + 1, N] or [1, N, 7]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    preprocess="yolo",
    rotated=True,
)
