"""Detectors of torchvision: objects that the graph has selected, in pixels of the model's input.

    boxes [n, 4]: left, top, right, bottom; labels [n], integers from 1; scores [n] (and masks, which are left out)

n may be 0. COCO's models have labels 1 to 90 with gaps. Source: torchvision, models/detection/generalized_rcnn.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects
from edgeq_device.answers.rows import are_selected, find_numbers, list_objects


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the objects."""
    boxes, labels, scores = (outputs[head.outputs[role]] for role in ("boxes", "labels", "scores"))
    if boxes.ndim != 2:
        raise ValueError("the boxes are not [n, 4]")
    return list_objects(to_pixels(boxes, head.parameters.get("unit", "pixel"), size), scores, labels, head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept boxes [n, 4], integers [n] and scores [n]."""
    arrays = {name: array for name, array in view.outputs.items() if array.ndim < 3}
    boxes = [n for n, a in arrays.items() if a.ndim == 2 and a.shape[1] == 4 and a.dtype.kind == "f"]
    labels = [n for n, a in arrays.items() if a.ndim == 1 and a.dtype.kind in "iu"]
    scores = [n for n, a in arrays.items() if a.ndim == 1 and a.dtype.kind == "f"]
    if len(arrays) != 3 or not len(boxes) == len(labels) == len(scores) == 1:
        return None
    box, label, score = (arrays[names[0]] for names in (boxes, labels, scores))
    if not len(box) == len(label) == len(score):
        return None
    # No object is a legal answer, and shapes without a batch are those of no other family.
    if len(box) and not (view.forced or are_selected(box, score, label)):
        return None
    numbers = find_numbers(int(label.max(initial=0)), view.classes, 1)
    return Fit({"boxes": boxes[0], "labels": labels[0], "scores": scores[0]}, {**state_unit(box), **numbers})


FAMILY = Family(
    "torchvision",
    "detect",
    "boxes [n, 4], labels [n] and scores [n]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 100},
)
