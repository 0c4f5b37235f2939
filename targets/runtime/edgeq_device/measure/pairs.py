"""Pair the outputs of two models by a basis: match rows without a place, and mark the elements that count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.measure.basis import Axis, Basis, Padding
from edgeq_device.measure.rows import match_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class OutputPair:
    """Hold one output of two models for one sample, with the elements that count.

    Attributes:
        reference, candidate: arrays; of one shape if rows were matched.
        mask: which elements count, in the arrays' shape; None if all do.
        hidden: number of elements at padded positions.
        real, positions: numbers of real positions and of all positions, if a mask hides positions of this output.
        nothing: number of elements that mean nothing in both models.
        strays: number of elements that mean nothing in one model alone.
        nonfinite: number of elements that are NaN or infinite in one model alone and are not strays.
        rows: number of rows to match, the larger of both models; 0 if rows have their place.
        rows_found: number of matched rows.
        ranked: axis of the matched rows; None if rows have their place.
    """

    name: str
    reference: Array
    candidate: Array
    mask: Optional[Array] = None
    hidden: int = 0
    real: int = 0
    positions: int = 0
    nothing: int = 0
    strays: int = 0
    nonfinite: int = 0
    rows: int = 0
    rows_found: int = 0
    ranked: Optional[int] = None

    def to_numbers(self) -> Tuple[Array, Array]:
        """Return the reference and the candidate as float64, with zeros in place of the elements that do not count."""
        arrays = np.asarray(self.reference, np.float64), np.asarray(self.candidate, np.float64)
        if self.mask is None:
            return arrays
        r, c = (np.where(self.mask, array, 0.0) for array in arrays)
        return r, c


def pair_outputs(basis: Basis, reference: Arrays, candidate: Arrays, inputs: Arrays) -> Iterator[OutputPair]:
    """Yield the outputs of numbers that both models have, for one sample.

    Args:
        inputs: the inputs from which both were computed.
    """
    common = [
        name
        for name, array in reference.items()
        if name in candidate and array.dtype.kind in "biuf" and candidate[name].dtype.kind in "biuf"
    ]
    groups: Dict[str, List[str]] = {}
    for name in common:
        axis = basis.ranked.get(name)
        if axis is not None and min(reference[name].ndim, candidate[name].ndim) > axis.place:
            # Outputs of one TopK share its order, so they are matched together.
            groups.setdefault(axis.origin, []).append(name)
    matched = {
        pair.name: pair for names in groups.values() for pair in _match_group(basis, names, reference, candidate)
    }
    for name in common:
        pair = matched.get(name) or OutputPair(name, reference[name], candidate[name])
        yield _mark_counted(basis, pair, inputs)


def pair_tensor(basis: Basis, name: str, reference: Array, candidate: Array, inputs: Arrays) -> OutputPair:
    """Return one tensor of two models, with the elements that count. Rows are not matched."""
    return _mark_counted(basis, OutputPair(name, reference, candidate), inputs)


def find_visible(padding: Padding, tensor: str, shape: Sequence[int], inputs: Arrays) -> Optional[Array]:
    """Return which elements of a tensor are at real positions, in a shape that broadcasts to `shape`. Return None
    if no mask hides any of them.

    Args:
        inputs: the model's inputs from which the tensor was computed.
    """
    axes = (padding.axes.get(tensor), padding.keys.get(tensor))
    marks = [_mark_real(axis, padding.masks[axis.origin], shape, inputs) for axis in axes if axis is not None]
    found = [real for real in marks if real is not None and not real.all()]
    return np.logical_and(*found) if len(found) == 2 else found[0] if found else None


def count_positions(padding: Padding, tensor: str, shape: Sequence[int], inputs: Arrays) -> Tuple[int, int]:
    """Return the numbers of real positions and of all positions of a tensor; (0, 0) if no mask applies to it."""
    axis = padding.axes.get(tensor)
    real = _mark_real(axis, padding.masks[axis.origin], shape, inputs) if axis is not None else None
    return (int(real.sum()), real.size) if real is not None else (0, 0)


def _mark_real(axis: Axis, hidden: bool, shape: Sequence[int], inputs: Arrays) -> Optional[Array]:
    """Return which positions along one axis are real, in a shape that broadcasts to `shape`. Return None if the mask
    does not fit, or hides everything.

    Args:
        hidden: the truth value of the mask at hidden positions.
    """
    mask = inputs.get(axis.origin)
    if mask is None or mask.ndim != 2 or axis.place >= len(shape):
        return None
    real: Array = mask.astype(bool) != hidden
    length, trailing = shape[axis.place], (1,) * (len(shape) - axis.place - 1)
    if not real.any():
        return None
    if axis.place and length == real.shape[1] and shape[0] == len(real):
        return real.reshape(len(real), *(1,) * (axis.place - 1), real.shape[1], *trailing)
    # Without a batch axis, the positions are those of the whole batch, one sequence after the other.
    return real.reshape(-1, *trailing) if length == real.size and (len(real) == 1 or not axis.place) else None


def _match_group(basis: Basis, names: Sequence[str], reference: Arrays, candidate: Arrays) -> Iterator[OutputPair]:
    """Yield the outputs whose rows have one order, with only the rows that both models found, in one order."""
    reference_rows, candidate_rows = (
        [_to_rows(o[n], basis.ranked[n].place) for n in names] for o in (reference, candidate)
    )
    counts = {array.shape[:2] for array in reference_rows}, {array.shape[:2] for array in candidate_rows}
    batches = {shape[0] for shapes in counts for shape in shapes}
    if any(len(shapes) > 1 for shapes in counts) or len(batches) > 1:
        return  # The outputs do not share rows after all.
    # Each item of a batch has an order of its own.
    pairs = [
        match_rows([a[item] for a in reference_rows], [a[item] for a in candidate_rows])
        for item in range(batches.pop())
    ]
    rows = sum(max(len(reference_rows[0][item]), len(candidate_rows[0][item])) for item in range(len(pairs)))
    for name in names:
        place, arrays = basis.ranked[name].place, (reference[name], candidate[name])
        r, c = (_pick_rows(array, place, [pair[side] for pair in pairs]) for side, array in enumerate(arrays))
        yield OutputPair(name, r, c, rows=rows, rows_found=r.shape[place], ranked=place)


def _mark_counted(basis: Basis, pair: OutputPair, inputs: Arrays) -> OutputPair:
    reference, candidate = pair.reference, pair.candidate
    if reference.shape != candidate.shape or not reference.size:
        return pair
    if pair.ranked is None:
        count, positions = count_positions(basis.padding, pair.name, reference.shape, inputs)
        pair = replace(pair, real=count, positions=positions)
    visible = find_visible(basis.padding, pair.name, reference.shape, inputs) if pair.ranked is None else None
    real = None if visible is None else np.broadcast_to(visible, reference.shape)
    hidden = 0 if real is None else int((~real).sum())
    if "f" not in (reference.dtype.kind, candidate.dtype.kind):
        return replace(pair, mask=real, hidden=hidden)
    limit = basis.limits.get(pair.name, math.inf)
    # This is the common case, which needs no copy in float64.
    if real is None and _is_below(reference, limit) and _is_below(candidate, limit):
        return pair
    r, c = (np.asarray(array, np.float64) for array in (reference, candidate))
    empty_r, empty_c = ~(np.abs(r) < limit), ~(np.abs(c) < limit)
    real = np.ones(reference.shape, bool) if real is None else real
    both = real & empty_r & empty_c & ((np.sign(r) == np.sign(c)) | (np.isnan(r) & np.isnan(c)))
    mask = real & ~empty_r & ~empty_c
    one_sided = real & ~both & ~mask
    # Without a limit, no number means nothing: a NaN or an infinity in one model alone is an error of that model.
    wrong = one_sided & ((~np.isfinite(c) & ~empty_r) | np.isnan(c)) if limit < math.inf else one_sided
    return replace(
        pair,
        mask=mask,
        hidden=hidden,
        nothing=int(both.sum()),
        strays=int((one_sided & ~wrong).sum()),
        nonfinite=int(wrong.sum()),
    )


def _is_below(array: Array, limit: float) -> bool:
    """Return whether the absolute value of every element is below the limit. A NaN is not."""
    return -float(array.min()) < limit and float(array.max()) < limit


def _to_rows(array: Array, place: int) -> Array:
    """Return an array as [batch, rows, columns], where the rows are those along axis `place`."""
    batch, columns = math.prod(array.shape[:place]), math.prod(array.shape[place + 1 :])
    return array.reshape(batch, array.shape[place], columns)


def _pick_rows(array: Array, place: int, rows: Sequence[Array]) -> Array:
    """Return the chosen rows of all items of the batch, joined along axis `place`. The axes before it have length 1."""
    items = array.reshape(len(rows), array.shape[place], *array.shape[place + 1 :])
    picked = np.concatenate([item[places] for item, places in zip(items, rows)])
    return picked.reshape((1,) * place + picked.shape)
