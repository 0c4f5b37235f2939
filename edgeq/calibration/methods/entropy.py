"""Choose the thresholds that lose the least information, by the minimum Kullback-Leibler divergence.

For a threshold T, the reference P is the distribution with all values beyond ±T moved into the outermost bins. Q is the
distribution inside ±T after quantization: its bins are joined into as many levels as the integer type has. The weight
of each level is then spread evenly over those of its bins that are not empty. edgeq uses the threshold with the
smallest D(P‖Q) (Migacz, "8-bit inference with TensorRT", GTC 2017). Exact zeros are left out, because every threshold
represents them exactly.

A window must contain at least half of the data. Otherwise, if no data are near zero, a window could contain no data, or
only the smallest values. All other data would be in its outermost bin, P and Q would be equal, and the window would win
with a divergence of zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import BINS, Float64s, Int64s, Linear, TensorStatistics, linear_of
from edgeq.model.quant_params import Grid

CANDIDATES = 128
"""Number of thresholds to try: every 32nd bin."""
MIN_SHARE = 0.5
"""Smallest share of the data that a window must contain."""
FLOOR = 1e-4
"""Weight, in elements, of a bin that is empty in Q but not in P. A weight of zero would make the divergence infinite.
"""


def entropy_range(linear: Linear, *, levels: int, symmetric: bool) -> tuple[float, float]:
    """Return the window with the smallest divergence, as (low, high).

    Args:
        linear: histogram of the tensor.
        levels: number of values of the integer type in use, such as 256.
        symmetric: whether the window is always ±T. If not, it ends where the data end.
    """
    start, stop = windows(linear.counts, levels, symmetric=symmetric)
    sums = _running(linear.counts)
    eligible = sums[stop] - sums[start] >= MIN_SHARE * sums[-1]
    best = int(np.argmin(np.where(eligible, divergences(linear.counts, start, stop, levels), np.inf)))
    return float(start[best] - BINS) * linear.width, float(stop[best] - BINS) * linear.width


def windows(counts: Float64s, levels: int, *, symmetric: bool) -> tuple[Int64s, Int64s]:
    """Return candidate windows as half-open ranges of bins. Each window is larger than the one before, and the last one
    contains all bins with data.
    """
    used = np.flatnonzero(counts)
    begin, end = (int(used[0]), int(used[-1]) + 1) if used.size else (BINS - 1, BINS + 1)
    # The widest window holds all data, so no further one can be better.
    reach = max(BINS - begin, end - BINS, 1)
    step = BINS // CANDIDATES
    # A narrower window would have fewer bins than levels, and quantization would be exact in it.
    narrowest = min(levels // 2, reach)
    sides = np.append(np.arange(narrowest, reach, step), reach)
    start, stop = BINS - sides, BINS + sides
    if not symmetric:
        start, stop = np.maximum(start, min(begin, BINS)), np.minimum(stop, max(end, BINS))
    return start, stop


def divergences(counts: Float64s, start: Int64s, stop: Int64s, levels: int) -> Float64s:
    """Return D(P‖Q) for all windows. Running sums make this O(levels) for each window instead of O(bins)."""
    total = counts.sum()
    if total == 0:
        return np.zeros(start.size)
    sums = _running(counts)
    filled = _running(counts > 0)
    information = _running(_xlogx(counts))

    outside_low, outside_high = sums[start], total - sums[stop]
    first_count, last_count = counts[start], counts[stop - 1]
    # In a window of one bin, the first bin is also the last and gets the data from both sides.
    alone = stop - start == 1
    inside_information = information[stop] - information[start]
    inside_information += _xlogx(first_count + outside_low + np.where(alone, outside_high, 0.0)) - _xlogx(first_count)
    inside_information += np.where(alone, 0.0, _xlogx(last_count + outside_high) - _xlogx(last_count))

    place = start[:, None] + np.arange(levels + 1) * (stop - start)[:, None] // levels
    weight = np.diff(sums[place], axis=1)
    bins = np.diff(filled[place], axis=1)
    in_first = _first_level(place)
    in_last = _last_level(place)
    rows = np.arange(start.size)
    bins[rows, in_first] += (first_count == 0) & (outside_low > 0)
    bins[rows, in_last] += (last_count == 0) & (outside_high > 0) & ~(alone & (outside_low > 0))
    reference = weight.copy()
    reference[rows, in_first] += outside_low
    reference[rows, in_last] += outside_high
    spread = np.maximum(weight, FLOOR) / np.maximum(bins, 1.0)
    # The divergence compares shares, so Q is scaled to the data that the window holds.
    inside = np.maximum(sums[stop] - sums[start], FLOOR)
    cross = np.einsum("ij,ij->i", reference, np.log(spread))
    divergence: Float64s = (inside_information - cross) / total - np.log(total) + np.log(inside)
    return divergence


def _first_level(place: Int64s) -> Int64s:
    """Return the level that contains a window's first bin. If there are fewer bins than levels, the first levels are
    empty.
    """
    return np.asarray(np.argmax(np.diff(place, axis=1) > 0, axis=1), np.int64)


def _last_level(place: Int64s) -> Int64s:
    return np.asarray(place.shape[1] - 2 - np.argmax(np.diff(place, axis=1)[:, ::-1] > 0, axis=1), np.int64)


def _running(values: np.ndarray) -> Float64s:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])


def _xlogx(values: Float64s) -> Float64s:
    return values * np.log(np.where(values > 0, values, 1.0))


def _range(tensor: TensorStatistics, grid: Grid, options: Mapping[str, float]) -> tuple[float, float]:
    return entropy_range(linear_of(tensor.histogram), levels=grid.levels, symmetric=grid.symmetric)


METHOD = RangeMethod("entropy", "the range with the least Kullback-Leibler divergence", _range)
