"""YOLO-NAS of SuperGradients, in the three forms of its exports. TensorRT's EfficientNMS has the outputs of the third.

    boxes [1, N, 4]: left, top, right, bottom; scores [1, N, C], after their sigmoid
    rows [n, 7]: batch, left, top, right, bottom, score, class
    number of objects [1, 1], boxes [1, n, 4], scores [1, n], classes [1, n]

Boxes are in pixels of the model's input. Source: Deci-AI/super-gradients, documentation/source/models_export.md.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, state_unit, to_pixels
from edgeq_device.answers.families.ssd import have_background
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_strides
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class
from edgeq_device.answers.rows import are_corners, are_selected, drop_batch, find_pair, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each box, or the objects that the graph has selected."""
    roles = head.outputs
    if "rows" in roles:
        rows = drop_batch(outputs[roles["rows"]], 2)
        boxes, scores, classes = rows[:, 1:5], rows[:, 5], rows[:, 6]
    else:
        boxes, scores = outputs[roles["boxes"]][0], outputs[roles["scores"]][0]
        classes = outputs[roles["classes"]][0] if "classes" in roles else None
    boxes = to_pixels(boxes, head.parameters.get("unit", "pixel"), size)
    if classes is None:
        return pick_best_class(boxes, np.asarray(scores, np.float64))
    count = int(outputs[roles["count"]].reshape(-1)[0]) if "count" in roles else len(boxes)
    count = max(0, count)
    return list_objects(boxes[:count], scores[:count], classes[:count], head.parameters)


def _find_batch(outputs: Outputs) -> Optional[Dict[str, str]]:
    """Return the roles of the third form."""
    boxes = [n for n, a in outputs.items() if a.ndim == 3 and len(a) == 1 and a.shape[2] == 4]
    count = [n for n, a in outputs.items() if a.shape == (1, 1) and a.dtype.kind in "iu"]
    rows = [n for n, a in outputs.items() if a.ndim == 2 and len(a) == 1 and n not in count[:1]]
    scores = [n for n in rows if outputs[n].dtype.kind == "f"]
    classes = [n for n in rows if outputs[n].dtype.kind in "iu"]
    if len(outputs) != 4 or not len(boxes) == len(scores) == len(classes) == 1 or not count:
        return None
    return {"boxes": boxes[0], "scores": scores[0], "classes": classes[0], "count": count[0]}


def fit(view: View) -> Optional[Fit]:
    """Accept any of the three forms. Boxes of the first are one for each cell of the grid."""
    outputs = view.outputs
    classes: Any = None
    selected = len(outputs) != 2
    if len(outputs) == 1:
        ((name, rows),) = outputs.items()
        if rows.ndim != 2 or rows.shape[1] != 7:
            return None
        roles = {"rows": name}
        boxes, scores, classes = rows[:, 1:5], rows[:, 5], rows[:, 6]
    else:
        pair = find_pair(outputs) if not selected else None
        roles = {"boxes": pair[0], "scores": pair[1]} if pair else _find_batch(outputs) or {}
        if not roles:
            return None
        boxes, scores = outputs[roles["boxes"]][0], outputs[roles["scores"]][0]
        classes = outputs[roles["classes"]][0] if selected else None
    if not selected and view.classes not in (None, scores.shape[1]):
        return None
    if not view.forced:
        if selected and not are_selected(boxes, scores, classes):
            return None
        if not selected and not (are_scores(scores) and are_corners(boxes) and find_strides(len(boxes), view.size)):
            return None
        if not selected and have_background(scores):
            return None
    return Fit(roles, state_unit(boxes))


FAMILY = Family(
    "yolo-nas",
    "detect",
    "boxes [1, N, 4] and scores [1, N, classes]; rows [n, 7]; or boxes, scores, classes and their number",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "iou": 0.7, "limit": 300},
)
