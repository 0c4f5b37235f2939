"""RT-DETR of Ultralytics: queries without suppression.

    rows [1, Q, 4 + C]: centre x, centre y, width, height, class scores after their sigmoid (8.3 and older)
    rows [1, Q, 6]: centre x, centre y, width, height, score, class (8.4)

Boxes are shares of the input's size. Images are stretched to the input. Source: Ultralytics, nn/modules/head.py, class
RTDETRDecoder.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import are_scores, single_rows, to_pixels
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import find_strides
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, to_corners
from edgeq_device.answers.rows import are_centred_shares, are_numbers, drop_batch, list_objects, pick_best_pairs


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best pairs of query and class, or the pairs that the graph has selected."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    boxes = to_corners(to_pixels(rows[:, :4], head.parameters.get("unit", "share"), size))
    if head.parameters.get("selected"):
        return list_objects(boxes, rows[:, 4], rows[:, 5], head.parameters)
    return pick_best_pairs(boxes, rows[:, 4:], head.parameters)


def fit(view: View) -> Optional[Fit]:
    """Accept rows of at most 1000 queries that are not the cells of a grid."""
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] < 5 or len(view.outputs) != 1:
        return None
    name, rows = only
    selected = rows.shape[1] == 6 and are_numbers(rows[:, 5])
    if not selected and view.classes not in (None, rows.shape[1] - 4):
        return None
    if not view.forced:
        grid = any(len(rows) % each == 0 and find_strides(len(rows) // each, view.size) for each in (1, 3))
        scores = rows[:, 4:5] if selected else rows[:, 4:]
        if grid or not are_centred_shares(rows[:, :4]) or not are_scores(scores) or len(rows) < rows.shape[1]:
            return None
    return Fit({"rows": name}, {"selected": True} if selected else {})


FAMILY = Family(
    "rtdetr",
    "detect",
    "rows [1, Q, 4 + classes] or [1, Q, 6]: centre and size in shares",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.25, "limit": 300},
)
