"""YOLOv8, 9, 11, 12 and related models: boxes with class scores, decoded in the graph, without objectness.

    rows [1, 4 + C, N]: centre x, centre y, width, height, then class scores after their sigmoid

Boxes are in pixels of the model's input; .tflite files and some toolkits give shares of its size. N is the longer axis,
and [1, N, 4 + C] is also read. Source: Ultralytics, nn/modules/head.py, class Detect.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_strides
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners


def read_rows(outputs: Outputs, name: str) -> Any:
    """Return an output of shape [1, columns, N] or [1, N, columns] as [N, columns]."""
    array = np.asarray(outputs[name], np.float64)
    if array.ndim != 3 or len(array) != 1:
        raise ValueError(f"output {name} is not [1, columns, N]")
    return array[0].T if array.shape[1] < array.shape[2] else array[0]


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each row. Boxes are in pixels of the model's input."""
    rows = read_rows(outputs, head.outputs["rows"])
    if rows.shape[1] < 5:
        raise ValueError("a row has fewer than 5 columns")
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return pick_best_class(to_corners(boxes), rows[:, 4:])


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, 4 + C, N] whose sizes are not negative and whose scores are 0 to 1.

    [1, N, 4 + C] must be one row for each cell, and no column may be an objectness of 1. It may still be YOLOX decoded
    in the graph, whose first score is the objectness: only labels tell the two apart.
    """
    only = single_rows(view.outputs)
    if only is None or (len(view.outputs) != 1 and not view.forced):
        return None
    name, array = only
    if len(array) >= array.shape[1]:
        array = array.T
        if not view.forced and (
            not find_strides(array.shape[1], view.size) or array[4:].min(axis=1).max(initial=0) > 0.5
        ):
            return None
    if not 5 <= len(array) < array.shape[1] or (view.classes is not None and view.classes != len(array) - 4):
        return None
    if not view.forced and (not are_scores(array[4:]) or array[2:4].min() < 0):
        return None
    return Fit({"rows": name}, state_unit(array[:4].T))


FAMILY = Family(
    "yolov8",
    "detect",
    "rows [1, 4 + classes, N]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
    preprocess="yolo",
)
