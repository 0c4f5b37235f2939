"""Compare one model's outputs with another's: collect the running sums for the figures of `edgeq.measure.agreement`.

edgeq stores only sums, never outputs, so the memory that it needs does not depend on the number of samples.

Find the slices of an output that differ in unit from the rest. An example is the scores in a tensor that otherwise
contains boxes in pixels.

One SQNR over such an output describes only the largest values. All other values could be zero without a visible change.
So edgeq keeps sums for every index along every axis, and groups the indices by the scale of the reference there:

    scale[i]   the larger of two ratios, each of a size at index i to the largest such size at any index. The two sizes
               are max |r| and max r - min r, over all elements with the index. (If the values of a column happen to be
               near zero, they still vary as much as those of its neighbours.) Indices whose values are all in 0..1
               (scores, probabilities) share the largest of their scales, because a class that never occurs is not a
               unit of its own
    known[i]   scale[i] > 2^-24, the resolution of a float32; a smaller scale counts as zero (padding)
    levels     groups of indices, from the largest scale down. A new level begins at a scale that is more than 16 times
               smaller than the level's largest. Along axes of more than 12 indices (the channels of a feature map), the
               scale must be that much smaller than the next larger scale, because channels and positions of one unit
               fill a wide range evenly. There, a lower level must also contain more than an eighth of the indices, or
               the indices at one end of the axis, because some channels are hardly ever active

Neighbouring indices of the same level form one slice. An index without a level joins the slice before it. A slice's
SQNR is computed over its own elements. If two levels differ by a factor of 16 and are quantized with one scale, the
lower level loses 24 dB. That is half of the 48 dB that 8 bits give at best.

Only the reference decides the slices, so all candidates are judged alike. There are no slices along the axis of the
rows, along axes whose length differs between samples, and along axes of more than 4096 indices.

**Columns.** The last axis and axis 1 have columns if they have at most 256 indices, or if the output has one value for
each of their indices in a sample. Of every column with at least 8 values, edgeq also keeps the mean:

- A slice is judged around its mean too: sum (r - mean)^2 / sum (r - c)^2, with a mean for each column. The steps of 8
  bits over 0 to 301 K leave three values for a temperature, at 58 dB. The whole output is judged in the same way.
- A column that varies in the reference and is constant in the candidate is lost. A share s of lost columns counts as an
  SQNR of -20 log10(s): a tenth of the columns is as bad as noise with a tenth of the signal's amplitude.
- If an output has one value in 0..1 for each column and sample, each column is a slice: labels from common to rare, or
  the parts of a composition.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import OutputPair, pair_outputs, pair_tensor
from numpy.typing import NDArray

from edgeq.data.records import Sample
from edgeq.errors import DataError
from edgeq.measure.agreement import Agreement, ClassScores, OutputAgreement, Outputs, SliceAgreement

if TYPE_CHECKING:
    from edgeq.measure.task import Task

Floats = NDArray[np.float64]
Run = tuple[int, int]
"""First and last index of a slice."""

_UNLIKE = 16.0
_FEW_INDICES = 12
_SCARCE = 8
_NEGLIGIBLE = 2.0**-24
_MOST_INDICES = 4096
_MOST_COLUMNS = 256
# Fewer values have a mean and a spread by chance.
_LEAST_VALUES = 8
# A smaller share of a sum of squares is not known, because the summands are rounded to 40 bits.
_ROUNDED = 2.0**-38
# Each summand keeps 40 bits. A block covers 8 exponents, so an int64 can hold the sum of 2^14 summands and a part that
# is not full.
_BITS, _BLOCK, _FULL = 40, 8, 61


def like_slices(low: Floats, high: Floats, *, alone: bool = False) -> list[Run]:
    """Return the slices of an axis, given the range of values low[i] to high[i] of each index i. Return [] if all
    indices have one unit.

    Args:
        alone: True if the output has one value for each index in a sample. Then each index with values in 0..1 is a
            slice, if all indices are.
    """
    if alone and len(low) > 1 and (low >= 0).all() and (high <= 1).all():
        return [(index, index) for index in range(len(low))]
    scale = np.zeros(len(low))
    with np.errstate(over="ignore"):
        sizes = np.maximum(-low, high), np.minimum(high - low, sys.float_info.max)
    for size in sizes:
        if size.any():
            scale = np.maximum(scale, size / size.max())
    known = scale > _NEGLIGIBLE
    shares = known & (low >= 0) & (high <= 1)
    if shares.any():
        scale = np.where(shares, scale[shares].max(), scale)
    level_of: dict[float, int] = {}
    level, largest, previous = 0, 0.0, 0.0
    for value in sorted({float(value) for value in scale[known]}, reverse=True):
        if value * _UNLIKE < (largest if len(scale) <= _FEW_INDICES else previous):
            level, largest = level + 1, value
        largest, previous = max(largest, value), value
        level_of[value] = level
    if not level:
        return []
    levels = np.array([level_of[float(v)] if there else -1 for v, there in zip(scale, known, strict=True)])
    if len(scale) > _FEW_INDICES:
        for lower in range(1, level + 1):
            own = levels == lower
            count = int(own.sum())
            if count * _SCARCE <= len(scale) and not (own[:count].all() or own[-count:].all()):
                levels[own] = -1
    starts, current = [0], next(found for found in levels if found >= 0)
    for index, found in enumerate(levels):
        if found not in (-1, current):
            starts.append(index)
            current = found
    return list(zip(starts, [*(start - 1 for start in starts[1:]), len(scale) - 1], strict=True)) if starts[1:] else []


@dataclass
class ExactSums:
    """Sum numbers, with one sum for each index.

    Each summand is rounded to 40 bits and then added exactly, so the sum does not depend on the order.

    Attributes:
        parts: for each block b of exponents, sums in units of 2^(8 b - 40).
    """

    parts: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, values: Floats) -> None:
        """Add rows of numbers, [rows, indices]."""
        mantissa, exponent = np.frexp(np.clip(values, -sys.float_info.max, sys.float_info.max))
        block, shift = np.divmod(exponent, _BLOCK)
        whole = np.rint(mantissa * 2.0**_BITS).astype(np.int64) << shift
        for place in np.unique(block):
            self._add(int(place), np.where(block == place, whole, 0).sum(0))

    def merge(self, other: ExactSums) -> None:
        """Add other sums of the same indices."""
        for place, part in other.parts.items():
            self._add(place, part)

    def _add(self, place: int, part: NDArray[np.int64]) -> None:
        total = self.parts[place] + part if place in self.parts else part
        if (np.abs(total) >> _FULL).any():  # Leave space for further summands.
            carry = total >> _BLOCK
            total = total - (carry << _BLOCK)
            self._add(place + 1, carry)
        self.parts[place] = total

    def total(self) -> Floats:
        """Return the sum of each index. A sum that overflows counts as the largest float64."""
        if not self.parts:
            return np.zeros(1)
        # Digits of one block each are the same however the parts were added up.
        found, carry = np.zeros(1), np.zeros(1, np.int64)
        place, last = min(self.parts), max(self.parts)
        with np.errstate(over="ignore"):
            while place <= last or ((carry != 0) & (carry != -1)).any():
                digits = carry + self.parts.get(place, 0)
                carry = digits >> _BLOCK
                found = found + np.ldexp((digits - (carry << _BLOCK)).astype(np.float64), _BLOCK * place - _BITS)
                place += 1
            found = found + np.ldexp(carry.astype(np.float64), _BLOCK * place - _BITS)
        clipped: Floats = np.clip(found, -sys.float_info.max, sys.float_info.max)
        return clipped


_POWERS = 4


@dataclass
class AxisSums:
    """Hold the running figures of every index along one axis.

    Attributes:
        low, high: smallest and largest values of the reference.
        least, most: smallest and largest values of the candidate.
        count: number of elements.
        powers: sums for all indices: first the squares of the reference, then those of the difference, then those of
            the candidate, then the values of the reference.
        columns: whether the indices are columns; see the module.
        alone: whether each sample has one value for each index.
    """

    low: Floats
    high: Floats
    least: Floats
    most: Floats
    max_abs_error: Floats
    count: NDArray[np.int64]
    powers: ExactSums = field(default_factory=ExactSums)
    columns: bool = False
    alone: bool = False

    @classmethod
    def of(cls, length: int) -> AxisSums:
        """Return sums without samples for an axis of `length` indices."""
        low, high = np.full(length, np.inf), np.full(length, -np.inf)
        return cls(low, high, low.copy(), high.copy(), np.zeros(length), np.zeros(length, np.int64))

    def merge(self, other: AxisSums) -> None:
        """Add the sums of other samples."""
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.least, self.most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        self.max_abs_error = np.maximum(self.max_abs_error, other.max_abs_error)
        self.count += other.count
        self.powers.merge(other.powers)
        self.columns, self.alone = self.columns and other.columns, self.alone and other.alone

    def slices(self, axis: int) -> list[SliceAgreement]:
        """Return the slices along the axis; [] if it has only one."""
        seen = self.count > 0
        low, high = np.where(seen, self.low, 0.0), np.where(seen, self.high, 0.0)
        signal, noise, other, _ = self._totals()
        found = []
        for first, last in like_slices(low, high, alone=self.alone and self._many):
            part = slice(first, last + 1)
            powers = (float(min(total[part].sum(), sys.float_info.max)) for total in (signal, noise, other))
            r, e, c = powers
            found.append(
                SliceAgreement(
                    axis,
                    first,
                    last,
                    peak=float(max(-low[part].min(), high[part].max())),
                    sqnr_db=decibels(r, e),
                    # With e = r - c for each pair, 2 r c = r^2 + c^2 - e^2.
                    cosine=_cosine((r + c - e) / 2, r, c),
                    max_abs_error=float(self.max_abs_error[part].max()),
                    centred_db=self.centred_db(part),
                )
            )
        return found

    def centred_db(self, part: slice = slice(None)) -> float | None:
        """Return the SQNR of some indices around their means. Return None if they do not vary, have too few values, or
        have no noise.
        """
        signal, noise, _, sums = (total[part] for total in self._totals())
        count = self.count[part]
        if not self.columns or not self._many:
            # Indices that are not columns, or have few values, share one mean.
            signal, noise, sums, count = (np.array([array.sum()]) for array in (signal, noise, sums, count))
        if count.min(initial=_LEAST_VALUES) < _LEAST_VALUES:
            return None
        varied, noise_power = float(np.sum(_variation(signal, sums, count))), float(noise.sum())
        return decibels(varied, noise_power) if varied > 0 and noise_power > 0 else None

    def lost(self) -> tuple[int, int]:
        """Return the number of columns that vary in the reference and are constant in the candidate, and the number of
        all columns that vary in the reference.
        """
        if not self.columns or not self._many:
            return 0, 0
        signal, _, _, sums = self._totals()
        scale = np.maximum(np.abs(self.low), np.abs(self.high))
        varies = (_variation(signal, sums, self.count) > 0) & (scale > _NEGLIGIBLE * scale.max())
        return int((varies & (self.least == self.most)).sum()), int(varies.sum())

    @property
    def _many(self) -> bool:
        """Return whether every index has enough values for a mean."""
        return bool((self.count >= _LEAST_VALUES).all())

    def _totals(self) -> NDArray[np.float64]:
        """Return the sums as [powers, indices]."""
        return np.broadcast_to(self.powers.total(), _POWERS * len(self.low)).reshape(_POWERS, -1)


def _variation(squares: Floats, sums: Floats, count: NDArray[np.int64]) -> Floats:
    """Return sum (x - mean)^2 from sum x^2 and sum x. A variation that the rounding of a float32 can cause counts as
    none.
    """
    varied = squares - sums**2 / np.maximum(count, 1)
    return np.where(varied > _ROUNDED * squares, varied, 0.0)


@dataclass
class SliceSums:
    """Hold the running figures of one output for each index along an axis. Only axes that have the same length in all
    samples are included.
    """

    axes: dict[int, AxisSums] = field(default_factory=dict)
    seen: bool = False

    def update(
        self,
        reference: Floats,
        candidate: Floats,
        inputs: Iterable[NDArray[Any]],
        *,
        rows: int = 1,
        counted: NDArray[np.bool_] | None = None,
        ranked: int | None = None,
    ) -> None:
        """Add one sample, or several single rows. The result for several rows is the same as if they came one by one.

        Args:
            counted: which elements to add, in the arrays' shape; None adds all. The others must be zero.
            ranked: an axis of rows without a fixed place. There are no slices along it.
        """
        allowed = judged_axes(reference.shape, inputs, rows)
        allowed.pop(-1 if ranked is None else ranked, None)
        self._keep(allowed)
        if not self.axes:
            return
        error = reference - candidate
        with np.errstate(over="ignore"):
            powers = reference**2, error**2, candidate**2, reference
        for axis, sums in self.axes.items():
            others = tuple(k for k in range(reference.ndim) if k != axis)
            low, least, high, most = reference, candidate, reference, candidate
            if counted is not None:
                low, least = (np.where(counted, array, np.inf) for array in (reference, candidate))
                high, most = (np.where(counted, array, -np.inf) for array in (reference, candidate))
            sums.low, sums.least = np.minimum(sums.low, low.min(others)), np.minimum(sums.least, least.min(others))
            sums.high, sums.most = np.maximum(sums.high, high.max(others)), np.maximum(sums.most, most.max(others))
            sums.max_abs_error = np.maximum(sums.max_abs_error, np.abs(error).max(others))
            length = reference.shape[axis]
            sums.count = sums.count + (reference.size // length if counted is None else counted.sum(others))
            sums.powers.add(np.concatenate([_by_row(power, axis, rows) for power in powers], axis=1))
            alone = reference.size == rows * length
            sums.alone = alone
            sums.columns = alone or (axis in (1, reference.ndim - 1) and length <= _MOST_COLUMNS)

    def merge(self, other: SliceSums) -> None:
        """Add the sums of other samples."""
        if not other.seen:
            return
        if self.seen:
            self._keep({axis: len(sums.low) for axis, sums in other.axes.items()})
            for axis, sums in self.axes.items():
                sums.merge(other.axes[axis])
        else:
            self.axes, self.seen = copy.deepcopy(other.axes), True

    def _keep(self, lengths: Mapping[int, int]) -> None:
        if not self.seen:
            self.axes = {axis: AxisSums.of(length) for axis, length in lengths.items()}
        self.axes = {axis: sums for axis, sums in self.axes.items() if lengths.get(axis) == len(sums.low)}
        self.seen = True

    def result(self) -> list[SliceAgreement]:
        """Return the slices along each axis that has more than one slice."""
        return [part for axis, sums in self.axes.items() for part in sums.slices(axis)]

    def centred_db(self) -> float | None:
        """Return the lowest SQNR around the means of the columns of an axis, or None if no axis has columns that
        vary.
        """
        known = [sums.centred_db() for sums in self.axes.values() if sums.columns]
        return min((db for db in known if db is not None), default=None)

    def lost(self) -> tuple[int, int]:
        """Return the number of lost columns and the number of columns that vary, of the axis that loses most."""
        return max((sums.lost() for sums in self.axes.values()), key=lambda n: n[0] / max(1, n[1]), default=(0, 0))


def judged_axes(shape: tuple[int, ...], inputs: Iterable[NDArray[Any]], rows: int = 1) -> dict[int, int]:
    """Return axis → length, for the axes along which an output may have slices.

    The first axis is included only for a single sample, and only if the first axis of every input has another length.
    """
    firsts = [array.shape[:1] for array in inputs]
    start = 0 if firsts and rows == 1 and shape[:1] not in firsts else 1
    return {k: n for k, n in enumerate(shape) if k >= start and 2 <= n <= _MOST_INDICES and 0 not in shape}


def _by_row(power: Floats, axis: int, rows: int) -> Floats:
    """Return, for each row, the sums for each index along `axis`, [rows, length].

    The elements are added in the same order as for a single row, so the sums are identical.
    """
    if power.ndim == 2 and axis == 1 and rows == len(power):
        return power
    others = tuple(k for k in range(power.ndim) if k != axis)
    parts = [power[row : row + 1] for row in range(rows)] if rows > 1 else [power]
    return np.stack([part.sum(others) for part in parts])


def rows(sample: Sample, outputs: dict[str, Outputs]) -> Iterator[tuple[Sample, dict[str, Outputs]]]:
    """Yield each real row of a gathered batch as a sample with a batch of 1. Yield any other sample unchanged.

    Args:
        sample: a sample. It is gathered if its context has the key "rows", with the contexts of the real rows. The real
            rows come first in the batch.
        outputs: outputs of each session.

    Raises:
        DataError: the first axis of an output is not as long as the batch.
    """
    contexts = sample.context.get("rows")
    if contexts is None:
        yield sample, outputs
        return
    size = len(next(iter(sample.inputs.values())))
    for made in outputs.values():
        for name, array in made.items():
            if array.ndim == 0 or len(array) != size:
                raise DataError(
                    f"{sample.name}: a batch of {size}, but output {name!r} has shape {list(array.shape)}",
                    "Export the model with a free batch or a batch of 1",
                )
    for row, context in enumerate(contexts):
        one = slice(row, row + 1)
        yield (
            dataclasses.replace(
                sample,
                name=f"{sample.name}, row {row}",
                inputs={name: array[one] if array.ndim else array for name, array in sample.inputs.items()},
                label=sample.label[row] if sample.label is not None else None,
                context=context,
            ),
            {session: {name: array[one] for name, array in made.items()} for session, made in outputs.items()},
        )


_UNIT = 2**1074
"""The reciprocal of the smallest positive float64. Every float64 is a multiple of that number."""
_NO_INPUTS: Outputs = MappingProxyType({})
_MOST_SLICES = 64


@dataclass
class OutputComparison:
    """Hold the running sums of one output.

    The sums are exact multiples of the smallest float64, so parts can be merged in any order.
    """

    name: str
    elements: int = 0
    signal: int = 0
    noise: int = 0
    product: int = 0
    candidate_power: int = 0
    sum: int = 0
    max_abs_error: float = 0.0
    equal_rows: int = 0
    equal_elements: int = 0
    indices: bool = False
    classes: ClassScores = field(default_factory=ClassScores)
    hidden: int = 0
    nothing: int = 0
    strays: int = 0
    nonfinite: int = 0
    mismatched: int = 0
    unmatched_rows: int = 0
    unmatched_elements: int = 0
    rows: int = 0
    rows_found: int = 0
    ranked: bool = False
    slices: SliceSums | None = None

    def update(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        inputs: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        *,
        rows: int = 1,
        basis: Basis = EVERYTHING,
    ) -> None:
        """Add the arrays of one sample or of several single rows.

        The sums for several rows are the same as if the rows came one by one.

        Args:
            reference, candidate: numbers or booleans, of any shape.
            inputs: the inputs from which both were computed.
            rows: number of single rows; 1 for a sample.
            basis: what the figures are taken over.
        """
        self.add(pair_tensor(basis, self.name, reference, candidate, inputs), inputs, rows=rows)

    def add(self, pair: OutputPair, inputs: Mapping[str, NDArray[Any]], *, rows: int = 1) -> None:
        """Add one sample or several single rows, as `update` does."""
        reference, candidate = pair.reference, pair.candidate
        self.indices |= reference.dtype.kind == "b" or (reference.dtype.kind in "iu" and reference.dtype.itemsize >= 4)
        for count in ("hidden", "nothing", "strays", "nonfinite", "rows", "rows_found"):
            setattr(self, count, getattr(self, count) + getattr(pair, count))
        self.ranked |= pair.ranked is not None
        if reference.shape != candidate.shape:
            self.mismatched += 1
            self.unmatched_rows += len(reference) if reference.ndim else 1
            self.unmatched_elements += max(reference.size, candidate.size)
            return
        if pair.ranked is not None:
            columns = math.prod(reference.shape[pair.ranked + 1 :])
            self.unmatched_elements += (pair.rows - pair.rows_found) * columns
        best = self.classes.update(reference, inputs) if pair.ranked is None else None
        self.classes.shaped = self.classes.shaped and pair.ranked is None
        if best is not None:
            self.equal_rows += int((best == candidate.reshape(len(best), -1).argmax(1)).sum())
        (r, c), counted = pair.to_numbers(), pair.mask
        elements = r.size if counted is None else int(counted.sum())
        if not elements:
            return
        error = r - c
        self.elements += elements
        self.equal_elements += elements - int(np.count_nonzero(error))
        for a, b, e in zip(r.reshape(rows, -1), c.reshape(rows, -1), error.reshape(rows, -1), strict=True):
            self.signal += _units(_dot(a, a))
            self.noise += _units(_dot(e, e))
            self.product += _units(_dot(a, b))
            self.candidate_power += _units(_dot(b, b))
            self.sum += _units(float(np.add.reduce(a)))
        self.max_abs_error = max(self.max_abs_error, float(np.abs(error).max()))
        if self.slices is not None and reference.dtype.kind == "f":
            self.slices.update(r, c, inputs.values(), rows=rows, counted=counted, ranked=pair.ranked)

    def merge(self, other: OutputComparison) -> None:
        """Add the sums of later samples."""
        for total in dataclasses.fields(self):
            if total.type == "int":
                setattr(self, total.name, getattr(self, total.name) + getattr(other, total.name))
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)
        self.indices |= other.indices
        self.ranked |= other.ranked
        self.classes.merge(other.classes)
        if self.slices is not None and other.slices is not None:
            self.slices.merge(other.slices)

    def result(self, *, classes: bool = False) -> OutputAgreement:
        """Return the figures of all samples so far.

        Args:
            classes: whether the output contains class scores, if it is shaped like them.
        """
        rows = self.classes.rows + self.unmatched_rows
        powers = (self.signal, self.noise, self.product, self.candidate_power)
        signal, noise, product, other = (power / _UNIT for power in powers)
        columns = self.slices.lost() if self.slices is not None and not classes else (0, 0)
        return OutputAgreement(
            name=self.name,
            elements=self.elements,
            sqnr_db=decibels(signal, noise) if self.elements else -math.inf,
            cosine=_cosine(product, signal, other) if self.elements else 0.0,
            max_abs_error=self.max_abs_error,
            top1=_share(self.equal_rows, rows) if classes and self.classes.shaped and self.classes.rows else None,
            nonfinite=self.nonfinite,
            mismatched=self.mismatched,
            same=_share(self.equal_elements, self.elements + self.unmatched_elements) if self.indices else None,
            slices=() if classes else self.parts(),
            centred_db=None if classes or self.indices else self._centred_db(),
            hidden=self.hidden,
            nothing=self.nothing,
            strays=self.strays,
            rows_found=_share(self.rows_found, self.rows) if self.ranked else None,
            lost_columns=columns[0],
            columns=columns[1],
        )

    def parts(self) -> tuple[SliceAgreement, ...]:
        """Return the output's slices of different scale. If there are more than 64, return the 64 worst. Return () if
        slices were not recorded.
        """
        found = sorted(self.slices.result() if self.slices is not None else (), key=lambda part: part.least_db)
        return tuple(sorted(found[:_MOST_SLICES], key=lambda s: (s.axis, s.first)))

    def _centred_db(self) -> float | None:
        """Return the lower of two SQNRs: around the mean of all elements, and around the means of the columns."""
        if self.elements < _LEAST_VALUES:
            return None
        # The integers are exact, so that subtracting the mean loses nothing.
        squares = self.signal * self.elements * _UNIT - self.sum**2
        varied = squares / (self.elements * _UNIT**2) if squares > 0 else 0.0
        if not self.noise or varied <= _ROUNDED * (self.signal / _UNIT):
            return None
        whole = decibels(varied, self.noise / _UNIT)
        columns = self.slices.centred_db() if self.slices is not None else None
        return whole if columns is None else min(whole, columns)


@dataclass
class OutputSums:
    """Hold the running sums of all outputs of one pair of models.

    Attributes:
        task: task that decides which output contains class scores. If it is None, edgeq decides by the values: see
            `ClassScores`.
        basis: what the figures of each output are taken over.
    """

    task: Task | None = None
    basis: Basis = EVERYTHING
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    count: int = 0
    _floats: set[str] = field(default_factory=set)

    def update(self, reference: Outputs, candidate: Outputs, inputs: Outputs = _NO_INPUTS, *, rows: int = 1) -> None:
        """Add the outputs (by name) and inputs of one sample, or of several single rows.

        An output that is not an array of numbers in both models is left out.
        """
        if rows > 1 and self.basis.ranked:  # Rows are matched within a sample.
            for row in range(rows):
                one = slice(row, row + 1)
                parts = (reference, candidate, inputs)
                self.update(*({n: a[one] if a.ndim else a for n, a in part.items()} for part in parts))
            return
        self.count += rows
        self._floats.update(name for name, array in reference.items() if array.dtype.kind == "f")
        for pair in pair_outputs(self.basis, reference, candidate, inputs):
            self.outputs.setdefault(pair.name, OutputComparison(pair.name, slices=SliceSums())).add(
                pair, inputs, rows=rows
            )

    def merge(self, other: OutputSums) -> None:
        """Add the sums of later samples."""
        self.count += other.count
        self._floats |= other._floats
        for name, output in other.outputs.items():
            self.outputs.setdefault(name, OutputComparison(name, slices=SliceSums())).merge(output)

    def result(self) -> Agreement:
        """Return the figures of all outputs and samples so far."""
        return Agreement(
            tuple(output.result(classes=self._holds_classes(output)) for output in self.outputs.values()), self.count
        )

    def _holds_classes(self, output: OutputComparison) -> bool:
        if self.task is None:
            alone = self._floats == {output.name}
            return alone and output.classes.plausible(output.name, one_unit=not output.parts())
        named = getattr(self.task, "output", None)
        return getattr(self.task, "classes", False) and named in (None, output.name)


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two powers: infinity without noise, minus infinity without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _units(value: float) -> int:
    """Return a finite float64 as a multiple of the smallest float64. A value that overflowed counts as the largest
    float64.
    """
    numerator, denominator = min(value, sys.float_info.max).as_integer_ratio()
    return numerator * (_UNIT // denominator)


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    # `a @ b` is not used, because BLAS would start its threads for it. If a runtime keeps the cores busy, starting the
    # threads takes a thousand times as long as the sum itself.
    return float(np.einsum("i,i->", a, b))


def _cosine(product: float, a: float, b: float) -> float:
    if a == 0 or b == 0:
        return 1.0 if a == b else 0.0
    # Rounding can place the quotient a few ulp outside -1..1.
    return max(-1.0, min(1.0, product / (math.sqrt(a) * math.sqrt(b))))
