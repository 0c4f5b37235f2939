"""PP-YOLOE and PicoDet of PaddleDetection without suppression.

    boxes [1, N, 4]: left, top, right, bottom in pixels; scores [1, C, N], after their sigmoid

With an input `scale_factor`, boxes are in pixels of the stored image. Source: PaddleDetection,
ppdet/modeling/heads/ppyoloe_head.py, post_process.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import are_scores, state_unit, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class
from edgeq_device.answers.rows import are_corners, drop_batch, find_pair, find_size_inputs


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each box."""
    boxes, scores = (drop_batch(outputs[head.outputs[role]], 2) for role in ("boxes", "scores"))
    return pick_best_class(to_pixels(boxes, head.parameters.get("unit", "pixel"), size), scores.T)


def fit(view: View) -> Optional[Fit]:
    """Accept two outputs: corners, and scores with the classes first."""
    pair = find_pair(view.outputs, transposed=True)
    if pair is None or len(view.outputs) != 2 or view.classes not in (None, view.outputs[pair[1]].shape[1]):
        return None
    boxes, scores = (view.outputs[name][0] for name in pair)
    if not view.forced and (len(scores) >= len(boxes) or not are_scores(scores) or not are_corners(boxes)):
        return None
    return Fit({"boxes": pair[0], "scores": pair[1]}, {**state_unit(boxes), **find_size_inputs(view.inputs)})


FAMILY = Family(
    "ppyoloe",
    "detect",
    "boxes [1, N, 4] and scores [1, classes, N]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.5, "iou": 0.6, "limit": 300},
)
