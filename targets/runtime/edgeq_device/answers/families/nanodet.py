"""NanoDet-Plus: class scores, and the distance from a cell to each side of the box as a distribution.

    rows [1, N, C + 4 * 8]: class scores after their sigmoid, then 8 logits for each of left, top, right and bottom

The logits belong to distances of 0 to 7 strides. Cells are listed row by row; the sizes of levels are rounded up. The
levels begin with the finest stride: 8, 16, 32 and perhaps 64. A box's centre is the corner of its cell, not its middle.
Source: RangiLyu/nanodet, nanodet/model/head/nanodet_plus_head.py.
"""

from __future__ import annotations

from typing import Optional, Tuple

from edgeq_device.answers.checks import are_scores, single_rows
from edgeq_device.answers.family import Family, Fit, Outputs, View
from edgeq_device.answers.grids import add_distances, expect_distances, find_strides, lay_cells
from edgeq_device.answers.head import Head
from edgeq_device.answers.objects import Objects, pick_best_class
from edgeq_device.answers.rows import drop_batch

_BINS = 8


def candidates(outputs: Outputs, head: Head, size: Tuple[int, int]) -> Objects:
    """Return the best class of each cell."""
    rows = drop_batch(outputs[head.outputs["rows"]], 2)
    strides = find_strides(len(rows), size, up=True)
    if strides is None:
        raise ValueError(f"{len(rows)} rows are not the cells of an input of {size[0]}x{size[1]}")
    bins = int(head.parameters.get("bins", _BINS))
    cells, stride = lay_cells(size, strides, up=True)
    boxes = add_distances(cells, expect_distances(rows[:, -4 * bins :], bins)) * stride
    return pick_best_class(boxes, rows[:, : -4 * bins])


def fit(view: View) -> Optional[Fit]:
    """Accept rows [1, N, C + 32] for the cells, whose first columns are scores and whose others are not."""
    bins = int(view.hints.get("bins", _BINS))
    only = single_rows(view.outputs)
    if only is None or only[1].shape[1] <= 4 * bins or view.classes not in (None, only[1].shape[1] - 4 * bins):
        return None
    name, rows = only
    if find_strides(len(rows), view.size, up=True) is None:
        return None
    if not view.forced and (not are_scores(rows[:, : -4 * bins]) or are_scores(rows[:, -4 * bins :])):
        return None
    return Fit({"rows": name}, {"bins": bins})


FAMILY = Family(
    "nanodet",
    "detect",
    "rows [1, N, classes + 32]",
    fit,
    candidates=candidates,
    thresholds={"confidence": 0.4, "iou": 0.6, "limit": 100},
    preprocess="nanodet",
)
