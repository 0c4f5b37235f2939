"""YOLO models with masks whose objects the graph has selected: YOLO26, and exports with suppression inside.

    rows [1, N, 6 + M]: left, top, right, bottom, score, class, M coefficients
    prototypes [1, M, h, w] or [1, h, w, M]

Rows that fill up have low scores or are zero. Source: Ultralytics, engine/exporter.py, class NMSModel.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import single_rows, state_unit, to_pixels
from edgeq_device.answers.families.yolo_seg import masks
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the rows with their coefficients."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_pixels(rows[:, :4], head.parameters.get("unit", "pixel"), size)
    return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters, coefficients=rows[:, 6:])


def fit(view: View) -> Optional[Fit]:
    """Accept rows of objects with as many further columns as there are prototypes."""
    only = single_rows(view.outputs)
    prototypes = [(n, a) for n, a in view.outputs.items() if a.ndim == 4 and len(a) == 1 and a.dtype.kind == "f"]
    if only is None or len(prototypes) != 1 or len(view.outputs) != 2:
        return None
    (name, rows), (prototype, array) = only, prototypes[0]
    count = rows.shape[1] - 6
    if count < 1 or count not in (array.shape[1], array.shape[3]):
        return None
    if not view.forced and not are_selected(rows[:, :4], rows[:, 4], rows[:, 5]):
        return None
    layout = {"layout": "NHWC"} if count != array.shape[1] else {}
    return Fit({"rows": name, "prototypes": prototype}, {**state_unit(rows[:, :4]), **layout})


FAMILY = Family(
    "yolo-seg-nms",
    "segment",
    "rows [1, N, 6 + M] and prototypes [1, M, h, w]",
    fit,
    candidates=candidates,
    masks=masks,
    thresholds={"confidence": 0.25, "limit": 300},
    preprocess="yolo",
)
