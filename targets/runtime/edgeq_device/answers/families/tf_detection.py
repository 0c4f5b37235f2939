"""Models of TensorFlow's object detection API, and .tflite files with its postprocessing operator.

    boxes [1, N, 4]: top, left, bottom, right in shares of the input's size
    classes [1, N] and scores [1, N], floats; the number of objects [1]

Classes are numbered from 1 (`detection_classes`), or from 0 after the operator TFLite_Detection_PostProcess. Further
outputs of `raw_...` are left out. Source: tensorflow/models, research/object_detection/exporter.py.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, find_numbers, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return as many objects as the model counts."""
    boxes = drop_batch(outputs[head.outputs["boxes"]], 2)[:, [1, 0, 3, 2]]
    scores, classes = (drop_batch(outputs[head.outputs[role]], 1) for role in ("scores", "classes"))
    boxes = to_pixels(boxes, head.parameters.get("unit", "share"), size)
    count = int(np.asarray(outputs[head.outputs["count"]]).reshape(-1)[0]) if "count" in head.outputs else len(boxes)
    count = max(0, count)
    return list_objects(boxes[:count], scores[:count], classes[:count], head.parameters)


def _find_roles(outputs: Outputs) -> Optional[Dict[str, str]]:
    """Return the roles of four outputs: by name, or by shapes and by the whole numbers of classes."""
    parts = {
        "boxes": "detection_boxes",
        "scores": "detection_scores",
        "classes": "detection_classes",
        "count": "num_detections",
    }
    named = {
        role: next((n for n in outputs if n.split(":")[0].endswith(part) and "raw" not in n), None)
        for role, part in parts.items()
    }
    if all(named.values()):
        return {role: str(name) for role, name in named.items()}
    boxes = [n for n, a in outputs.items() if a.ndim == 3 and len(a) == 1 and a.shape[2] == 4]
    count = [n for n, a in outputs.items() if a.size == 1 and a.ndim == 1]
    rows = [n for n, a in outputs.items() if a.ndim == 2 and len(a) == 1 and a.dtype.kind == "f"]
    if len(outputs) != 4 or (len(boxes), len(count), len(rows)) != (1, 1, 2):
        return None
    # The operator lists classes and then scores. Values show another order.
    classes, scores = rows if are_scores(outputs[rows[1]]) else rows[::-1]
    return {"boxes": boxes[0], "scores": scores, "classes": classes, "count": count[0]}


def fit(view: View) -> Optional[Fit]:
    """Accept boxes, scores, classes and a count."""
    roles = _find_roles(view.outputs)
    if roles is None:
        return None
    arrays = {role: np.asarray(view.outputs[name], np.float64) for role, name in roles.items()}
    boxes, scores, classes = arrays["boxes"], arrays["scores"], arrays["classes"]
    if boxes.ndim != 3 or not boxes.shape[:2] == scores.shape == classes.shape or len(boxes) != 1:
        return None
    # Corners of top and left first are corners in both orders.
    if not view.forced and not are_selected(boxes[0], scores[0], classes[0]):
        return None
    offset = 1 if "detection_classes" in roles["classes"] else 0
    numbers = find_numbers(int(classes.max(initial=0)), view.classes, offset)
    return Fit(roles, {**state_unit(boxes[0], "share"), **numbers})


FAMILY = Family(
    "tf-detection",
    "detect",
    "boxes [1, N, 4], classes [1, N], scores [1, N] and a count",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 100},
)
