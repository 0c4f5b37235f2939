"""YOLO models with rotated boxes that the graph has selected: YOLO26, and exports with suppression inside.

    rows [1, N, 7]: centre x, centre y, width, height, score, class, angle in radians

Rows that fill up have low scores or are zero. Source: Ultralytics, engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.rows import are_numbers, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_corners(to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size))
    return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters, angles=rows[:, 6])


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, N, 7] of boxes, scores, whole class numbers and angles."""
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] != 7 or len(view.outputs) != 1:
        return None
    name, rows = only
    right = are_scores(rows[:, 4]) and are_numbers(rows[:, 5]) and rows[:, 2:4].min() >= 0
    if not view.forced and not (right and np.abs(rows[:, 6]).max() <= np.pi):
        return None
    return Fit({"rows": name}, state_unit(rows[:, :4]))


FAMILY = Family(
    "yolo-obb-nms",
    "obb",
    "rows [1, N, 7]: centre, size, score, class, angle",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
    preprocess="yolo",
)
