"""Boxes and scores in front of the selection that end-to-end models do in the graph (YOLOv10, YOLO26, RT-DETR).

    boxes [1, N, 4] and scores [1, N, C], or with the last two axes swapped

edgeq cuts the graph of such a model there. The best pairs of box and class are the objects, and nothing is suppressed.
The parameter "boxes" is "corners" or "centre", "unit" is "pixel" or "share", "scores" is "scores" or "logits", and
"axes" are the axes of the columns in both outputs.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

from edgeq_device.answers.checks import to_pixels
from edgeq_device.answers.family import Family, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners

_LIMIT = 300


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best pairs of box and class."""
    boxes, scores = (
        np.moveaxis(np.asarray(outputs[head.outputs[role]], np.float64), axis, 2)[0]
        for role, axis in zip(("boxes", "scores"), head.parameters["axes"])
    )
    if boxes.shape != (len(scores), 4):
        raise ValueError("boxes and scores do not belong together")
    if head.parameters["scores"] == "logits":
        scores = 1 / (1 + np.exp(-np.clip(scores, -60, 60)))
    flat = scores.reshape(-1)
    limit = min(int(head.thresholds.get("limit", _LIMIT)), flat.size)
    # Pairs outside the limit need no order, and there may be a million of them.
    best = np.sort(np.argpartition(-flat, limit - 1)[:limit]) if limit else np.zeros(0, np.int64)
    rows, classes = np.divmod(best, scores.shape[1])
    boxes = to_pixels(boxes[rows], head.parameters["unit"], size)
    return Objects(to_corners(boxes) if head.parameters["boxes"] == "centre" else boxes, flat[best], classes)


def fit(view: View) -> Any:
    """Accept nothing: only a cut graph has such outputs, and it states its head."""
    del view


FAMILY = Family(
    "pairs",
    "detect",
    "boxes [1, N, 4] and scores [1, N, classes] of a cut graph",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": _LIMIT},
)
