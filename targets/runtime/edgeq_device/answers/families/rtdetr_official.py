"""RT-DETR, D-FINE and DEIM as their authors export them: queries that the graph has selected.

    labels [1, Q] integers, boxes [1, Q, 4] left, top, right, bottom, scores [1, Q]

The second input `orig_target_sizes` [1, 2] is the width and height of the stored image, and boxes are in its pixels.
Without that input, boxes are in pixels of the model's input or shares of its size; the ONNX Model Zoo's SSD gives
these. Source: lyuwenyu/RT-DETR, rtdetrv2_pytorch/tools/export_onnx.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, drop_batch, find_numbers, find_size_inputs, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the queries."""
    boxes, scores, labels = (
        drop_batch(outputs[head.outputs[r]], n) for r, n in (("boxes", 2), ("scores", 1), ("labels", 1))
    )
    return list_objects(to_pixels(boxes, head.parameters.get("unit", "pixel"), size), scores, labels, head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept exactly three outputs: boxes [1, Q, 4], whole numbers [1, Q] and scores [1, Q]."""
    arrays = view.outputs
    boxes = [n for n, a in arrays.items() if a.ndim == 3 and len(a) == 1 and a.shape[2] == 4 and a.dtype.kind == "f"]
    labels = [n for n, a in arrays.items() if a.ndim == 2 and len(a) == 1 and a.dtype.kind in "iu"]
    scores = [n for n, a in arrays.items() if a.ndim == 2 and len(a) == 1 and a.dtype.kind == "f"]
    if len(arrays) != 3 or not len(boxes) == len(labels) == len(scores) == 1:
        return None
    box, label, score = (arrays[names[0]][0] for names in (boxes, labels, scores))
    if not len(box) == len(label) == len(score) or not (view.forced or are_selected(box, score, label)):
        return None
    numbers = find_numbers(int(label.max(initial=0)), view.classes, 0)
    parameters = {**state_unit(box), **numbers, **find_size_inputs(view.inputs)}
    return Fit({"boxes": boxes[0], "labels": labels[0], "scores": scores[0]}, parameters)


FAMILY = Family(
    "rtdetr-official",
    "detect",
    "labels [1, Q], boxes [1, Q, 4] and scores [1, Q]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 300},
)
