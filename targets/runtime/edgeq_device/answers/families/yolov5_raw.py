"""YOLOv5 and v7 cut before their decoding: raw levels with three anchors a cell.

    for each stride: [1, 3, h, w, 5 + C] or [1, 3 * (5 + C), h, w]: x, y, w, h, objectness, classes, before or after
    their sigmoid

    centre = (2 sigmoid(xy) - 0.5 + cell) * stride    size = (2 sigmoid(wh))^2 * anchor

The parameter "anchors" is "yolov5", "yolov7", "yolov5-p6", or numbers with blanks between; trained models may have
anchors of their own. Source: ultralytics/yolov5, models/yolo.py, class Detect.
"""

from __future__ import annotations

from typing import Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_anchor_levels, list_anchor_rows, read_anchor_levels, sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class, to_corners


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each anchor in each cell."""
    levels = read_anchor_levels({name: outputs[name] for name in head.outputs.values()}, size)
    rows, cells, stride, anchors = list_anchor_rows(levels, head.parameters.get("anchors"), size)
    if head.parameters.get("scores") != "probabilities":
        rows = sigmoid(rows)
    boxes = np.concatenate([(2 * rows[:, :2] - 0.5 + cells) * stride, (2 * rows[:, 2:4]) ** 2 * anchors], axis=1)
    return pick_best_class(to_corners(boxes), rows[:, 4:5] * rows[:, 5:])


def fit(view: View) -> Optional[Fit]:
    """Accept levels whose objectness is mostly low. Levels of four axes before their sigmoid fit YOLOv3, too: only the
    boxes tell the two apart.
    """
    levels = find_anchor_levels(view.outputs, view.size, view.classes)
    if levels is None:
        return None
    probabilities = all(map(are_scores, levels))
    middle = 0.5 if probabilities else 0.0
    if not view.forced and any(np.median(level[:, 4]) >= middle for level in levels):
        return None
    roles = {f"level{number}": name for number, name in enumerate(view.outputs)}
    return Fit(roles, {"scores": "probabilities" if probabilities else "logits"})


FAMILY = Family(
    "yolov5-raw",
    "detect",
    "for each stride [1, 3, h, w, 5 + classes] or [1, 3 * (5 + classes), h, w]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.45, "limit": 300},
    preprocess="yolo",
)
