"""YOLOv10, YOLO26 and all exports with suppression inside: objects that the graph has selected.

    rows [1, N, 6]: left, top, right, bottom, score, class

Boxes are in pixels of the model's input, or shares of its size. Rows that fill up have low scores or are zero.
Source: Ultralytics, nn/modules/head.py (end to end) and engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import single_rows, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept one output [1, N, 6] of corners, scores and whole class numbers."""
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] != 6:
        return None
    name, rows = only
    if not view.forced and not are_selected(rows[:, :4], rows[:, 4], rows[:, 5]):
        return None
    if view.classes is not None and rows[:, 5].max() >= view.classes:
        return None
    return Fit({"rows": name}, state_unit(rows[:, :4]))


FAMILY = Family(
    "detections",
    "detect",
    "rows [1, N, 6]: corners, score, class",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
    preprocess="yolo",
)
