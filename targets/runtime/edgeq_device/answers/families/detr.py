"""DETR, YOLOS, RT-DETR, D-FINE and related models as Hugging Face exports them: raw queries.

    logits [1, Q, C] or [1, Q, C + 1], boxes [1, Q, 4]: centre x, centre y, width, height in shares of the input's size

The parameter "scores" is "softmax" (DETR, Conditional DETR's predecessor YOLOS: the last class is "no object" and is
dropped), or "sigmoid" (RT-DETR, D-FINE, Deformable and Conditional DETR: a query may have several classes).
Source: transformers, image_processing_detr.py and image_processing_rt_detr.py, post_process_object_detection.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import sigmoid, softmax
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.rows import (
    are_centred_shares,
    drop_batch,
    find_numbers,
    find_pair,
    is_named,
    list_objects,
    pick_best_pairs,
)


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each query, or the best pairs of query and class."""
    logits = drop_batch(outputs[head.outputs["logits"]], 2)
    boxes = to_corners(to_pixels(drop_batch(outputs[head.outputs["boxes"]], 2), "share", size))
    if head.parameters["scores"] == "sigmoid":
        return pick_best_pairs(boxes, sigmoid(logits), head.parameters)
    scores = softmax(logits)[:, :-1]
    return list_objects(boxes, scores.max(axis=1), scores.argmax(axis=1), head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept boxes in shares and logits. Most queries see no object, so the last class is the best of most of them
    where it means that.
    """
    floats = {n: a for n, a in view.outputs.items() if not is_named(n, "hidden", "attention", "auxiliary")}
    # Further outputs are those of other layers.
    if {"logits", "pred_boxes"} <= set(floats):
        floats = {name: floats[name] for name in ("logits", "pred_boxes")}
    pair = find_pair(floats)
    if pair is None or len(floats) > 2 or {"dets", "labels"} <= set(floats):
        return None
    boxes, logits = (np.asarray(view.outputs[name][0], np.float64) for name in pair)
    if not view.forced and not are_queries(boxes, logits):
        return None
    columns = logits.shape[1]
    softmaxed = np.mean(logits.argmax(axis=1) == columns - 1) > 0.5
    if view.classes == columns - 1 or (softmaxed and view.classes != columns):
        scores, count = "softmax", columns - 1
    else:
        scores, count = "sigmoid", columns
    # COCO's models have a column for each of its numbers, 0 to 90.
    coco = view.classes == 80 and count in (90, 91)
    if not coco and view.classes not in (None, count):
        return None
    numbers = find_numbers(count - 1, 80, count - 90) if coco else {}
    return Fit({"boxes": pair[0], "logits": pair[1]}, {"scores": scores, **numbers})


def are_queries(boxes: Any, logits: Any) -> bool:
    """Return whether boxes [Q, 4] are shares, and logits [Q, C] are not scores yet."""
    return are_centred_shares(boxes) and not are_scores(logits) and float(logits.min()) < 0


FAMILY = Family(
    "detr",
    "detect",
    "logits [1, Q, classes] and boxes [1, Q, 4] in shares",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "limit": 300},
)
