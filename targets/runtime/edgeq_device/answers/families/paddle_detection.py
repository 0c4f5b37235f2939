"""PaddleDetection with suppression inside: objects in pixels of the stored image.

    rows [n, 6]: class, score, left, top, right, bottom; the number of rows [1], integers

Rows that fill up have class -1. The input `scale_factor` [1, 2] is the ratio of the model's input to the stored image
(height, width), and `im_shape` the size of the input. Source: PaddleDetection, deploy/third_engine/onnx/infer.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, find_size_inputs, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_pixels(rows[:, 2:], head.parameters.get("unit", "pixel"), size)
    return list_objects(boxes, rows[:, 1], rows[:, 0], head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept rows [n, 6] of class, score and corners, and perhaps a count."""
    rows = [n for n, a in view.outputs.items() if a.ndim == 2 and a.shape[1] == 6 and a.dtype.kind == "f"]
    others = [a for n, a in view.outputs.items() if n not in rows]
    if len(rows) != 1 or len(others) > 1 or any(a.size != 1 or a.dtype.kind not in "iu" for a in others):
        return None
    values = view.outputs[rows[0]]
    # Corners come before scores elsewhere, and then the second column is not a score.
    if not view.forced and not are_selected(values[:, 2:], values[:, 1], values[:, 0]):
        return None
    return Fit({"rows": rows[0]}, {**state_unit(values[:, 2:]), **find_size_inputs(view.inputs)})


FAMILY = Family(
    "paddle-detection",
    "detect",
    "rows [n, 6]: class, score, corners; and a count",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 300},
)
