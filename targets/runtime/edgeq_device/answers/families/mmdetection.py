"""MMDetection exported by MMDeploy: objects that the graph has selected, in pixels of the model's input.

    dets [1, n, 5]: left, top, right, bottom, score; labels [1, n], integers (and masks, which are left out)

Rows that fill up have label -1. Source: open-mmlab/mmdeploy, codebase/mmdet/deploy/object_detection_model.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the objects."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    labels = drop_batch(outputs[head.outputs["labels"]], 1)
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return list_objects(boxes, rows[:, 4], labels, head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept rows [1, n, 5] and integers [1, n]."""
    rows = [n for n, a in view.outputs.items() if a.ndim == 3 and len(a) == 1 and a.shape[2] == 5]
    labels = [n for n, a in view.outputs.items() if a.ndim == 2 and len(a) == 1 and a.dtype.kind in "iu"]
    if len(rows) != 1 or len(labels) != 1 or len(view.outputs) > 3:
        return None
    values, numbers = view.outputs[rows[0]][0], view.outputs[labels[0]][0]
    if len(values) != len(numbers) or not (view.forced or are_selected(values[:, :4], values[:, 4], numbers)):
        return None
    if view.classes is not None and numbers.max(initial=0) >= view.classes:
        return None
    return Fit({"rows": rows[0], "labels": labels[0]}, state_unit(values[:, :4]))


FAMILY = Family(
    "mmdetection",
    "detect",
    "rows [1, n, 5]: corners, score; and labels [1, n]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.3, "limit": 100},
)
