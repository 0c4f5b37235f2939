"""SSD whose boxes the graph has decoded, such as torchvision's before its suppression, and UltraFace.

    boxes [1, N, 4]: left, top, right, bottom, in shares of the input's size or in its pixels
    scores [1, N, 1 + C]: after softmax (or a sigmoid); class 0 is the background and is dropped

With three classes and the background, both outputs have four columns, so the names decide ("box" or "loc" marks the
boxes). Source: W. Liu et al., "SSD: Single Shot MultiBox Detector", 2016.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import numpy as np

from edgeq_device.answers.checks import are_scores, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_strides
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class
from edgeq_device.answers.rows import are_corners, drop_batch, find_pair


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each box other than the background."""
    scores = drop_batch(outputs[head.outputs["scores"]], 2)
    boxes = drop_batch(outputs[head.outputs["boxes"]], 2)
    return pick_best_class(to_pixels(boxes, head.parameters.get("unit", "share"), size), scores[:, 1:])


def have_background(scores: Any) -> bool:
    """Return whether scores [N, 1 + C] are the shares of a softmax: each row sums to 1."""
    return bool(are_scores(scores) and np.abs(np.asarray(scores, np.float64).sum(axis=1) - 1).max() < 1e-2)


def fit(view: View) -> Optional[Fit]:
    """Accept corners and scores. Scores that do not sum to 1 belong to YOLO-NAS if there is one for each cell."""
    pair = find_pair(view.outputs)
    if pair is None or len(view.outputs) != 2:
        return None
    boxes, scores = (view.outputs[name][0] for name in pair)
    if scores.shape[1] < 2 or view.classes not in (None, scores.shape[1] - 1):
        return None
    if not view.forced:
        if not are_scores(scores) or not are_corners(boxes):
            return None
        if not have_background(scores) and find_strides(len(boxes), view.size):
            return None
    return Fit({"boxes": pair[0], "scores": pair[1]}, state_unit(boxes, "share"))


FAMILY = Family(
    "ssd",
    "detect",
    "boxes [1, N, 4] and scores [1, N, 1 + classes]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "iou": 0.45, "limit": 200},
)
