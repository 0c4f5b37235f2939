"""YOLOv7 exported with --end2end: objects that the graph has selected.

    rows [k, 7]: batch, left, top, right, bottom, class, score

The class comes before the score. Source: WongKinYiu/yolov7, models/experimental.py, class ONNX_ORT.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_pixels(rows[:, 1:5], head.parameters.get("unit", "pixel"), size)
    return list_objects(boxes, rows[:, 6], rows[:, 5], head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept one output [k, 7] of batch 0, corners, whole class numbers and scores."""
    ((name, rows),) = view.outputs.items() if len(view.outputs) == 1 else ((None, None),)
    if rows is None or rows.ndim != 2 or rows.shape[1] != 7:
        return None
    if not view.forced and (rows[:, 0].any() or not are_selected(rows[:, 1:5], rows[:, 6], rows[:, 5])):
        return None
    return Fit({"rows": str(name)}, state_unit(rows[:, 1:5]))


FAMILY = Family(
    "yolov7-end2end",
    "detect",
    "rows [k, 7]: batch, corners, class, score",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
    preprocess="yolo",
)
