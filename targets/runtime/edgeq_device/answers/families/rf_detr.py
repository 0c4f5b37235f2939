"""RF-DETR: raw queries.

    dets [1, Q, 4]: centre x, centre y, width, height in shares of the input's size
    labels [1, Q, C + 1]: logits

Scores are sigmoids, and the column after the classes is dropped. COCO's models have 91 columns, one for each of COCO's
numbers. Other shapes may be the same, so the names of the outputs decide. Source: roboflow/rf-detr,
rfdetr/export/_topk.py.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import to_pixels
from edgeq_device.answers.families.detr import are_queries
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import sigmoid
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.rows import drop_batch, find_numbers, pick_best_pairs

# The numbers of COCO's classes, from 0.
_COCO_COLUMNS = 91


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best pairs of query and class."""
    scores = sigmoid(drop_batch(outputs[head.outputs["labels"]], 2))
    boxes = to_corners(to_pixels(drop_batch(outputs[head.outputs["dets"]], 2), "share", size))
    return pick_best_pairs(boxes, scores if head.parameters.get("all") else scores[:, :-1], head.parameters)


def find_queries(view: View) -> Optional[Dict[str, Any]]:
    """Return the parameters of the outputs dets and labels, or None."""
    boxes, logits = view.outputs.get("dets"), view.outputs.get("labels")
    if boxes is None or logits is None or boxes.ndim != 3 or logits.ndim != 3 or boxes.shape[2] != 4:
        return None
    if len(boxes) != 1 or boxes.shape[:2] != logits.shape[:2] or logits.shape[2] < 2:
        return None
    if not view.forced and not are_queries(np.asarray(boxes[0]), np.asarray(logits[0], np.float64)):
        return None
    columns = logits.shape[2]
    if columns == _COCO_COLUMNS and view.classes in (None, 80, columns):
        return {"all": True, **(find_numbers(columns - 1, 80, 1) if view.classes == 80 else {})}
    return {} if view.classes in (None, columns - 1) else None


def fit(view: View) -> Optional[Fit]:
    """Accept the two outputs dets and labels."""
    parameters = find_queries(view) if len(view.outputs) == 2 else None
    return Fit({"dets": "dets", "labels": "labels"}, parameters) if parameters is not None else None


FAMILY = Family(
    "rf-detr",
    "detect",
    "dets [1, Q, 4] and labels [1, Q, classes + 1]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 300},
)
