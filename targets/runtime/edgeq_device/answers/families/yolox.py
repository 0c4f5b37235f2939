"""YOLOX: boxes relative to the cells of a grid, with objectness and class scores after their sigmoid.

    rows [1, N, 5 + C]: x, y in cells, logarithms of width and height in strides, objectness, class scores

    centre = (xy + cell) * stride    size = exp(wh) * stride    score = objectness * class

Cells are listed row by row. The levels begin with the finest stride: 8, 16, 32, and 64 in the larger variants.
Source: Megvii-BaseDetection/YOLOX, yolox/models/yolo_head.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, single_rows
from edgeq_device.answers.families.yolov5 import are_logarithms
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import exp, find_strides, lay_cells
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners
from edgeq_device.answers.rows import drop_batch


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each cell."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    strides = find_strides(len(rows), size)
    if strides is None:
        raise ValueError(f"{len(rows)} rows are not the cells of an input of {size[0]}x{size[1]}")
    cells, stride = lay_cells(size, strides)
    boxes = np.concatenate([(rows[:, :2] + cells) * stride, exp(rows[:, 2:4]) * stride], axis=1)
    return pick_best_class(to_corners(boxes), rows[:, 4:5] * rows[:, 5:])


def fit(view: View) -> Optional[Fit]:
    """Accept rows [1, N, 5 + C] for the cells, whose sizes are logarithms."""
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] < 6 or view.classes not in (None, only[1].shape[1] - 5):
        return None
    name, rows = only
    if find_strides(len(rows), view.size) is None:
        return None
    if not view.forced and not (are_scores(rows[:, 4:]) and are_logarithms(np.asarray(rows[:, :4], np.float64))):
        return None
    return Fit({"rows": name})


FAMILY = Family(
    "yolox",
    "detect",
    "rows [1, N, 5 + classes] with box centres and sizes relative to the grid",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.65, "limit": 300},
    preprocess="yolox",
)
