"""YOLOv5, 6 and 7: boxes with objectness and class scores, decoded in the graph.

    rows [1, N, 5 + C]: centre x, centre y, width, height, objectness, class scores, after their sigmoid

The score is objectness times class score; YOLOv6 has an objectness of 1. Boxes are in pixels of the model's input, or
shares of its size. N is the number of cells, or three times that. Further outputs, such as the raw levels, have other
shapes. Source: ultralytics/yolov5, models/yolo.py, class Detect.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_strides
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import drop_batch

# The largest logarithm of a box's width or height in strides. e to this power exceeds any image size.
MOST_LOGARITHM = 12.0


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return pick_best_class(to_corners(boxes), rows[:, 4:5] * rows[:, 5:])


def fit(view: View) -> Optional[Fit]:
    """Accept rows [1, N, 5 + C] whose scores are 0 to 1, and whose sizes are not logarithms."""
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] < 6 or view.classes not in (None, only[1].shape[1] - 5):
        return None
    name, rows = only
    boxes = np.asarray(rows[:, :4], np.float64)
    unit = state_unit(boxes)
    if not view.forced:
        # Queries are shares, too. The number of cells tells these rows from them.
        grid = any(len(rows) % each == 0 and find_strides(len(rows) // each, view.size) for each in (1, 3))
        if rows.shape[1] >= len(rows) or (unit and not grid):
            return None
        if not are_scores(rows[:, 4:]) or boxes[:, 2:].min() < 0 or are_logarithms(boxes):
            return None
    return Fit({"rows": name}, unit)


def are_logarithms(boxes: np.ndarray) -> bool:
    """Return whether boxes [N, 4] can be offsets in cells and logarithms of sizes, as YOLOX gives them.

    Shares of the input's size spread over 0 to 1, and sizes in pixels exceed any logarithm.
    """
    inside = boxes.min() >= 0 and boxes.max() <= 2 and (boxes[:, :2].max(axis=0) <= 1.1).all()
    return not inside and float(np.abs(boxes[:, 2:]).max()) < MOST_LOGARITHM


FAMILY = Family(
    "yolov5",
    "detect",
    "rows [1, N, 5 + classes]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.45, "limit": 300},
    preprocess="yolo",
)
