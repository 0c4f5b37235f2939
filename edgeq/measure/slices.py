"""Find the slices of an output that differ in unit from the rest. An example is the scores in a tensor that otherwise
contains boxes in pixels.

One SQNR over such an output describes only the largest values. All other values could be zero without a visible change.
So edgeq keeps sums for every index along every axis, and groups the indices by the scale of the reference there:

    scale[i]   the larger of two ratios, each of a size at index i to the largest such size at any index. The two sizes
               are max |r| and max r - min r, over all elements with the index. (If the values of a column happen to be
               near zero, they still vary as much as those of its neighbours.) Indices whose values are all in 0..1
               (scores, probabilities) share the largest of their scales, because a class that never occurs is not a
               unit of its own
    nonzero[i] scale[i] > 2^-24, the resolution of a float32; a smaller scale counts as zero (padding)
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
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.agreement import SliceAgreement
from edgeq.measure.exact_sums import ExactSums, Floats
from edgeq.measure.power_ratios import cosine, decibels

Run = tuple[int, int]
"""First and last index of a slice."""
# Ratio of two scales that lies between two levels. It is 24 dB, half of what 8 bits give at best.
_UNLIKE = 16.0
# Axes with more indices are channels or positions, which fill a wide range of scales evenly.
_FEW_INDICES = 12
# A level with this part of the indices or less may consist of channels that are hardly ever active.
_SCARCE = 8
# The resolution of a float32.
_NEGLIGIBLE = 2.0**-24
# These two bound the memory and time for sums. Longer axes are positions or a vocabulary.
_MOST_INDICES = 4096
_MOST_COLUMNS = 256
# Fewer values have a mean and a spread by chance.
LEAST_VALUES = 8
# A smaller share of a sum of squares is not known, because the summands are rounded to 40 bits.
ROUNDED = 2.0**-38


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
    nonzero = scale > _NEGLIGIBLE
    shares = nonzero & (low >= 0) & (high <= 1)
    if shares.any():
        scale = np.where(shares, scale[shares].max(), scale)
    level_of: dict[float, int] = {}
    level, largest, previous = 0, 0.0, 0.0
    for value in sorted({float(value) for value in scale[nonzero]}, reverse=True):
        if value * _UNLIKE < (largest if len(scale) <= _FEW_INDICES else previous):
            level, largest = level + 1, value
        largest, previous = max(largest, value), value
        level_of[value] = level
    if not level:
        return []
    levels = np.array([level_of[float(v)] if is_nonzero else -1 for v, is_nonzero in zip(scale, nonzero, strict=True)])
    if len(scale) > _FEW_INDICES:
        for lower in range(1, level + 1):
            members = levels == lower
            count = int(members.sum())
            if count * _SCARCE <= len(scale) and not (members[:count].all() or members[-count:].all()):
                levels[members] = -1
    starts, current = [0], next(index_level for index_level in levels if index_level >= 0)
    for index, index_level in enumerate(levels):
        if index_level not in (-1, current):
            starts.append(index)
            current = index_level
    return list(zip(starts, [*(start - 1 for start in starts[1:]), len(scale) - 1], strict=True)) if starts[1:] else []


# Squares of the reference, the difference and the candidate, and the values of the reference.
_POWERS = 4


@dataclass
class AxisSums:
    """Hold the running figures of every index along one axis.

    Attributes:
        low, high: smallest and largest values of the reference.
        candidate_low, candidate_high: smallest and largest values of the candidate.
        count: number of elements.
        powers: sums for all indices: first the squares of the reference, then those of the difference, then those of
            the candidate, then the values of the reference.
        columns: whether the indices are columns in all samples; see the module.
        alone: whether all samples have one value for each index.
    """

    low: Floats
    high: Floats
    candidate_low: Floats
    candidate_high: Floats
    max_abs_error: Floats
    count: NDArray[np.int64]
    powers: ExactSums = field(default_factory=ExactSums)
    columns: bool = True
    alone: bool = True

    @classmethod
    def of(cls, length: int) -> AxisSums:
        """Return sums without samples for an axis of `length` indices."""
        low, high = np.full(length, np.inf), np.full(length, -np.inf)
        return cls(low, high, low.copy(), high.copy(), np.zeros(length), np.zeros(length, np.int64))

    def merge(self, chunk: AxisSums) -> None:
        """Add the sums of other samples."""
        self.low, self.high = np.minimum(self.low, chunk.low), np.maximum(self.high, chunk.high)
        self.candidate_low = np.minimum(self.candidate_low, chunk.candidate_low)
        self.candidate_high = np.maximum(self.candidate_high, chunk.candidate_high)
        self.max_abs_error = np.maximum(self.max_abs_error, chunk.max_abs_error)
        self.count += chunk.count
        self.powers.merge(chunk.powers)
        self.columns, self.alone = self.columns and chunk.columns, self.alone and chunk.alone

    def slices(self, axis: int) -> list[SliceAgreement]:
        """Return the slices along the axis; [] if it has only one."""
        occupied = self.count > 0
        low, high = np.where(occupied, self.low, 0.0), np.where(occupied, self.high, 0.0)
        signal, noise, candidate_power, _ = self._totals()
        slices = []
        for first_index, last_index in like_slices(low, high, alone=self.alone and self._has_means):
            part = slice(first_index, last_index + 1)
            powers = (float(min(total[part].sum(), sys.float_info.max)) for total in (signal, noise, candidate_power))
            r, e, c = powers
            slices.append(
                SliceAgreement(
                    axis,
                    first_index,
                    last_index,
                    peak=float(max(-low[part].min(), high[part].max())),
                    sqnr_db=decibels(r, e),
                    # With e = r - c for each pair, 2 r c = r^2 + c^2 - e^2.
                    cosine=cosine((r + c - e) / 2, r, c),
                    max_abs_error=float(self.max_abs_error[part].max()),
                    centred_db=self.centred_db(part),
                )
            )
        return slices

    def centred_db(self, part: slice = slice(None)) -> float | None:
        """Return the SQNR of some indices around their means. Return None if they do not vary, have too few values, or
        have no noise.
        """
        signal, noise, _, sums = (total[part] for total in self._totals())
        count = self.count[part]
        if not self.columns or not self._has_means:
            # Indices that are not columns, or have few values, share one mean.
            signal, noise, sums, count = (np.array([array.sum()]) for array in (signal, noise, sums, count))
        if count.min(initial=LEAST_VALUES) < LEAST_VALUES:
            return None
        varied, noise_power = float(np.sum(_variation(signal, sums, count))), float(noise.sum())
        return decibels(varied, noise_power) if varied > 0 and noise_power > 0 else None

    def lost(self) -> tuple[int, int]:
        """Return the number of columns that vary in the reference and are constant in the candidate, and the number of
        all columns that vary in the reference.
        """
        if not self.columns or not self._has_means:
            return 0, 0
        signal, _, _, sums = self._totals()
        scale = np.maximum(np.abs(self.low), np.abs(self.high))
        varies = (_variation(signal, sums, self.count) > 0) & (scale > _NEGLIGIBLE * scale.max())
        return int((varies & (self.candidate_low == self.candidate_high)).sum()), int(varies.sum())

    @property
    def _has_means(self) -> bool:
        """Return whether every index has enough values for a mean."""
        return bool((self.count >= LEAST_VALUES).all())

    def _totals(self) -> NDArray[np.float64]:
        """Return the sums as [powers, indices]."""
        return np.broadcast_to(self.powers.total(), _POWERS * len(self.low)).reshape(_POWERS, -1)


def _variation(squares: Floats, sums: Floats, count: NDArray[np.int64]) -> Floats:
    """Return sum (x - mean)^2 from sum x^2 and sum x. A variation that the rounding of a float32 can cause counts as
    none.
    """
    varied = squares - sums**2 / np.maximum(count, 1)
    return np.where(varied > ROUNDED * squares, varied, 0.0)


@dataclass
class SliceSums:
    """Hold the running figures of one output for each index along an axis. Only axes that have the same length in all
    samples are included.
    """

    axes: dict[int, AxisSums] = field(default_factory=dict)
    started: bool = False

    def update(
        self,
        reference: Floats,
        candidate: Floats,
        inputs: Iterable[NDArray[Any]],
        *,
        rows: int = 1,
        mask: NDArray[np.bool_] | None = None,
        ranked: int | None = None,
    ) -> None:
        """Add one sample, or several single rows. The result for several rows is the same as if they came one by one.

        Args:
            mask: which elements to add, in the arrays' shape; None adds all. The others must be zero.
            ranked: an axis of rows without a fixed place. There are no slices along it.
        """
        allowed = judged_axes(reference.shape, inputs, rows)
        allowed.pop(-1 if ranked is None else ranked, None)
        self._keep(allowed)
        if not self.axes:
            return
        error = reference - candidate
        with np.errstate(over="ignore"):
            powers = np.square(reference), np.square(error), np.square(candidate), reference
        np.abs(error, out=error)
        low, candidate_low, high, candidate_high = reference, candidate, reference, candidate
        if mask is not None:
            # Elements that do not count are zero, and must not widen a range.
            low, candidate_low = (np.where(mask, array, np.inf) for array in (reference, candidate))
            high, candidate_high = (np.where(mask, array, -np.inf) for array in (reference, candidate))
        for axis, sums in self.axes.items():
            other_axes = tuple(k for k in range(reference.ndim) if k != axis)
            sums.low = np.minimum(sums.low, low.min(other_axes))
            sums.high = np.maximum(sums.high, high.max(other_axes))
            sums.max_abs_error = np.maximum(sums.max_abs_error, error.max(other_axes))
            length = reference.shape[axis]
            sums.count = sums.count + (reference.size // length if mask is None else mask.sum(other_axes))
            sums.powers.add(np.concatenate([_by_row(power, axis, rows) for power in powers], axis=1))
            alone = reference.size == rows * length
            sums.alone &= alone
            sums.columns &= alone or (axis in (1, reference.ndim - 1) and length <= _MOST_COLUMNS)
            # Only a column can be lost, which its range in the candidate shows.
            if sums.columns:
                sums.candidate_low = np.minimum(sums.candidate_low, candidate_low.min(other_axes))
                sums.candidate_high = np.maximum(sums.candidate_high, candidate_high.max(other_axes))

    def merge(self, chunk: SliceSums) -> None:
        """Add the sums of other samples."""
        if not chunk.started:
            return
        if self.started:
            self._keep({axis: len(sums.low) for axis, sums in chunk.axes.items()})
            for axis, sums in self.axes.items():
                sums.merge(chunk.axes[axis])
        else:
            self.axes, self.started = copy.deepcopy(chunk.axes), True

    def _keep(self, lengths: Mapping[int, int]) -> None:
        if not self.started:
            self.axes = {axis: AxisSums.of(length) for axis, length in lengths.items()}
        self.axes = {axis: sums for axis, sums in self.axes.items() if lengths.get(axis) == len(sums.low)}
        self.started = True

    def result(self) -> list[SliceAgreement]:
        """Return the slices along each axis that has more than one slice."""
        return [part for axis, sums in self.axes.items() for part in sums.slices(axis)]

    def centred_db(self) -> float | None:
        """Return the lowest SQNR around the means of the columns of an axis, or None if no axis has columns that
        vary.
        """
        levels = [sums.centred_db() for sums in self.axes.values() if sums.columns]
        return min((db for db in levels if db is not None), default=None)

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
    other_axes = tuple(k for k in range(power.ndim) if k != axis)
    parts = [power[row : row + 1] for row in range(rows)] if rows > 1 else [power]
    return np.stack([part.sum(other_axes) for part in parts])
