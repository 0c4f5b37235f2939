"""Ranges for tensors that a non-linear function follows: the least error behind the function, not before it.

A convolution in front of SiLU may reach from -139 to 23, and SiLU makes nothing of all that is below -8. Steps spent
there are wasted. So the range is searched that minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

where f is whatever follows element by element (`elementwise`). Nothing is known of the names of activations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.linear import linear_of
from edgeq.calibrate.mse import COARSE, REFINEMENTS, Grid
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import TensorStatistics
from edgeq.tune.recover.elementwise import Function

_MOST_BINS = 1024
"""Bins of the histogram that are looked at; the finest are joined until there are no more."""


def range_behind(tensor: TensorStatistics, function: Function, grid: Grid) -> Range:
    """The range of `tensor` with the least expected squared error behind `function`.

    Args:
        grid: the integers that the range is mapped to.
    """
    low, high = min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)
    if not tensor.count or low == high:
        return Range(0.0, 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high
    centres, counts = joined(*_bins(tensor))
    wanted = function(centres)

    def errors(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        found = [_error(centres, counts, wanted, function, low * a, high * b, grid) for a, b in shares]
        return np.array(found)

    one_side = np.ones(1)
    lows = COARSE if low < 0 and not grid.symmetric else one_side
    highs = COARSE if high > 0 else one_side
    pairs = np.array([(b if grid.symmetric else a, b) for a in lows for b in highs])
    best, least = _least(pairs, errors(pairs))
    for factor in REFINEMENTS:
        steps = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * steps, 1.0) if lows.size > 1 else one_side
        b = np.minimum(best[1] * steps, 1.0) if highs.size > 1 else one_side
        pairs = np.array([(y if grid.symmetric else x, y) for x in a for y in b])
        candidate, error = _least(pairs, errors(pairs))
        if error < least:
            best, least = candidate, error
    return Range(float(low * best[0]), float(high * best[1]))


def error_behind(tensor: TensorStatistics, function: Function, chosen: Range, grid: Grid) -> tuple[float, float]:
    """(expected squared error, expected square) of the ends for one element of `tensor` quantized over `chosen`."""
    if not tensor.count:
        return 0.0, 0.0
    centres, counts = joined(*_bins(tensor))
    wanted = function(centres)
    error = _error(centres, counts, wanted, function, chosen.low, chosen.high, grid)
    return error / tensor.count, float((wanted**2 @ counts).sum()) / tensor.count


def joined(
    centres: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Neighbouring bins joined until there are at most `_MOST_BINS`; centres are means weighted by count."""
    while len(centres) > _MOST_BINS:
        if len(centres) % 2:
            centres, counts = np.append(centres, centres[-1]), np.append(counts, 0.0)
        pairs, weights = centres.reshape(-1, 2), counts.reshape(-1, 2)
        counts = weights.sum(1)
        centres = np.where(counts > 0, (pairs * weights).sum(1) / np.maximum(counts, 1e-300), pairs.mean(1))
    return centres, counts


def _bins(tensor: TensorStatistics) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    return linear.centres()[filled], linear.counts[filled]


def _error(
    centres: NDArray[np.float64],
    counts: NDArray[np.float64],
    wanted: NDArray[np.float64],
    function: Function,
    low: float,
    high: float,
    grid: Grid,
) -> float:
    """The summed squared error, with scale and zero point as ONNX's QuantizeLinear has them.

    The function is evaluated once for each integer, not for each bin.
    """
    if high <= low:
        return float((wanted**2 @ counts).sum())
    scale = (high - low) / (grid.most - grid.least)
    middle = np.rint((grid.least + grid.most) / 2)
    zero = middle if grid.symmetric else np.clip(np.rint(grid.least - low / scale), grid.least, grid.most)
    levels = function((np.arange(grid.least, grid.most + 1) - zero) * scale)
    places = (np.clip(np.rint(centres / scale) + zero, grid.least, grid.most) - grid.least).astype(np.intp)
    return float(((levels[:, places] - wanted) ** 2 @ counts).sum())


def _least(pairs: NDArray[np.float64], errors: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])


def grid_of(activation_type: str, symmetric: bool) -> Grid:
    """The integers of an activation type."""
    if symmetric:
        return Grid(0, 255, True) if activation_type == "uint8" else Grid(-127, 127, True)
    return Grid(0, 255, False)
