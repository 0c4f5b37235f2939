"""Match the rows of two outputs whose order depends on the values, such as the detections of a detector without NMS.

Row 3 of one model need not be row 3 of the other: a score that differs in its fourth digit exchanges two rows. So each
row of the reference is paired with the row of the candidate that describes the same thing:

- Columns of class numbers or indices must be equal. These are the columns of integer outputs, and float columns that
  contain only whole numbers in both models.
- If four neighbouring columns are boxes (x1, y1, x2, y2), the boxes must overlap with an IoU of at least 0.75.
- Otherwise the distance must be at most half a standard deviation of the reference's rows, as the root mean square over
  the columns.

Rows are matched in the order of the reference, each with the best row that is still free. With scores in descending
order, as TopK and NonMaxSuppression write them, this is how COCO's evaluation assigns detections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

LEAST_IOU = 0.75
_MOST_DISTANCE = 0.5
# Number of pairs up to which the costs fit into a few megabytes.
_MOST_PAIRS = 4_000_000
# From here on, float32 has no fractions, so all numbers look whole.
_EXACT = 2.0**24


def match_rows(reference: Sequence[Array], candidate: Sequence[Array]) -> Tuple[Array, Array]:
    """Return the indices of the rows that belong together: int[m] of the reference and int[m] of the candidate.

    Args:
        reference, candidate: the outputs that share one order of rows, each [rows, columns].
    """
    identity = np.concatenate([_find_identities(r, c) for r, c in zip(reference, candidate)])
    a, b = (np.concatenate([array.astype(np.float64) for array in arrays], axis=1) for arrays in (reference, candidate))
    if not len(a) or not len(b) or len(a) * len(b) > _MOST_PAIRS:
        order = np.arange(min(len(a), len(b)))
        return order, order
    box = _find_boxes(a, identity)
    cost = (
        _compute_distances(a[:, ~identity], b[:, ~identity])
        if box is None
        else _compute_box_costs(a[:, box], b[:, box])
    )
    if identity.any():
        keys = np.concatenate([a[:, identity], b[:, identity]])
        numbers = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        cost[numbers[: len(a), None] != numbers[None, len(a) :]] = np.inf
    max_cost = _MOST_DISTANCE if box is None else 1 - LEAST_IOU
    reference_places, candidate_places = [], []
    for row, costs in enumerate(cost):
        best = int(costs.argmin())
        if costs[best] <= max_cost:
            reference_places.append(row)
            candidate_places.append(best)
            # A row of the candidate is matched once.
            cost[:, best] = np.inf
    return np.array(reference_places, np.intp), np.array(candidate_places, np.intp)


def _find_identities(reference: Array, candidate: Array) -> Array:
    """Return which columns contain class numbers, indices or truth values."""
    if reference.dtype.kind != "f":
        return np.ones(reference.shape[1], bool)
    is_identity = np.ones(reference.shape[1], bool)
    for array in (reference, candidate):
        values = array.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinities
            is_identity &= ((values == np.rint(values)) & (np.abs(values) < _EXACT)).all(0)
    return is_identity


def _find_boxes(rows: Array, identity: Array) -> Optional[slice]:
    """Return the first four neighbouring columns that are corners of boxes, or None."""
    for start in range(rows.shape[1] - 3):
        box = rows[:, start : start + 4]
        sides = box[:, 2:] - box[:, :2]
        if np.isfinite(box).all() and (sides >= 0).all() and (sides > 0).all(1).any():
            # Boxes in whole pixels are boxes nevertheless.
            identity[start : start + 4] = False
            return slice(start, start + 4)
    return None


def _compute_box_costs(a: Array, b: Array) -> Array:
    """Return 1 - IoU for each pair of boxes, [len(a), len(b)]. Equal boxes without an area have a cost of 0."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    overlap = np.prod(np.maximum(high - low, 0), axis=2)
    area_a, area_b = (np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1) for boxes in (a, b))
    union = area_a[:, None] + area_b[None, :] - overlap
    iou = np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)
    equal = (a[:, None] == b[None]).all(2)
    return np.where(equal, 0.0, np.nan_to_num(1 - iou, nan=np.inf))


def _compute_distances(a: Array, b: Array) -> Array:
    """Return the distance of each pair of rows in standard deviations of the reference's columns, [len(a), len(b)]."""
    if not a.shape[1]:
        return np.zeros((len(a), len(b)))
    finite_a, finite_b = np.nan_to_num(a), np.nan_to_num(b)
    spread = finite_a.std(0)
    spread = np.where(spread > 0, spread, np.maximum(np.abs(finite_a).max(0), 1e-12))
    # By the binomial formula, because a table of all differences would not fit into memory.
    x, y = finite_a / spread, finite_b / spread
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * np.einsum("ik,jk->ij", x, y)
    distances: Array = np.sqrt(np.maximum(squares, 0) / a.shape[1])
    return distances
