"""YOLOv3 and v4 as Darknet defines them: raw levels with three anchors a cell, before any sigmoid.

    for each stride, in any order: [1, 3 * (5 + C), h, w], anchor by anchor: x, y, w, h, objectness, classes

    centre = (cell + sigmoid(xy)) * stride   size = anchor * exp(wh)   score = sigmoid(objectness) * sigmoid(class)

The parameter "anchors" is "yolov5" (which are YOLOv3's), "yolov7" (YOLOv4's), "yolov3-tiny", or numbers with blanks
between. Source: J. Redmon and A. Farhadi, "YOLOv3: An Incremental Improvement", 2018.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import exp, find_anchor_levels, list_anchor_rows, read_anchor_levels, sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each anchor in each cell."""
    levels = read_anchor_levels({name: outputs[name] for name in head.outputs.values()}, size)
    rows, cells, stride, anchors = list_anchor_rows(levels, head.parameters.get("anchors"), size)
    boxes = np.concatenate([(cells + sigmoid(rows[:, :2])) * stride, anchors * exp(rows[:, 2:4])], axis=1)
    scores = sigmoid(rows[:, 4:])
    return pick_best_class(to_corners(boxes), scores[:, :1] * scores[:, 1:])


def fit(view: View) -> Optional[Fit]:
    """Accept levels of four axes before their sigmoid. Few cells see an object, so the objectness is mostly low."""
    levels = find_anchor_levels(view.outputs, view.size, view.classes)
    if levels is None or any(array.ndim != 4 for array in view.outputs.values()):
        return None
    if not view.forced and any(level.min() >= 0 or np.median(level[:, 4]) >= 0 for level in levels):
        return None
    return Fit({f"level{number}": name for number, name in enumerate(view.outputs)})


FAMILY = Family(
    "yolov3",
    "detect",
    "for each stride [1, 3 * (5 + classes), h, w] of Darknet",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.45, "limit": 300},
)
