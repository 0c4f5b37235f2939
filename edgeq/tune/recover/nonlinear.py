"""Ranges of tensors before a non-linear function: the least error behind the function, not before it.

A convolution before SiLU may reach from -139 to 23, and SiLU maps all that is below -8 to nearly zero. Steps spent
there are wasted. So the range is searched that minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

where f is whatever follows element by element (`elementwise`), under whatever operator names.
"""

from __future__ import annotations

import numpy as np

from edgeq.calibrate.linear import linear_of
from edgeq.calibrate.methods.mse import COARSE, REFINEMENTS
from edgeq.calibrate.range_method import Grid
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import TensorStatistics
from edgeq.tune.recover.elementwise import Function
from edgeq.tune.recover.layers import Floats

_MOST_BINS = 1024
"""Bins of the histogram that are evaluated; the finest are joined until there are no more."""


def range_behind(tensor: TensorStatistics, function: Function, grid: Grid) -> Range | None:
    """The range of `tensor` with the least expected squared error behind `function`; None where the function is not
    finite (a logarithm, a reciprocal) and the error is undefined.

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
    if not np.isfinite(wanted).all():
        return None

    def errors(shares: Floats) -> Floats:
        """float[n]: the weighted squared error of each of n pairs of shares of the range's ends."""
        found = [_error(centres, counts, wanted, function, Range(low * a, high * b), grid) for a, b in shares]
        return np.array(found)

    one_side = np.ones(1)
    lows = COARSE if low < 0 and not grid.symmetric else one_side
    highs = COARSE if high > 0 else one_side
    pairs = np.array([(b if grid.symmetric else a, b) for a in lows for b in highs])
    best, least = _least(pairs, errors(pairs))
    for factor in REFINEMENTS:
        around = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * around, 1.0) if lows.size > 1 else one_side
        b = np.minimum(best[1] * around, 1.0) if highs.size > 1 else one_side
        pairs = np.array([(y if grid.symmetric else x, y) for x in a for y in b])
        candidate, error = _least(pairs, errors(pairs))
        if error < least:
            best, least = candidate, error
    if not np.isfinite(least):
        return None
    return Range(float(low * best[0]), float(high * best[1]))


def joined(centres: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Neighbouring bins joined until there are at most `_MOST_BINS`; centres are means weighted by count."""
    while len(centres) > _MOST_BINS:
        if len(centres) % 2:
            centres, counts = np.append(centres, centres[-1]), np.append(counts, 0.0)
        pairs, weights = centres.reshape(-1, 2), counts.reshape(-1, 2)
        counts = weights.sum(1)
        centres = np.where(counts > 0, (pairs * weights).sum(1) / np.maximum(counts, 1e-300), pairs.mean(1))
    return centres, counts


def _bins(tensor: TensorStatistics) -> tuple[Floats, Floats]:
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    return linear.centres()[filled], linear.counts[filled]


def _error(centres: Floats, counts: Floats, wanted: Floats, function: Function, chosen: Range, grid: Grid) -> float:
    """The summed squared error. The function is evaluated once for each integer, not for each bin."""
    params = grid.params(chosen.low, chosen.high)
    levels = params.dequantize(np.arange(params.low, params.high + 1))
    made = function(levels)[:, params.quantize(centres).astype(np.intp) - params.low]
    if not np.isfinite(made).all():
        return np.inf
    return float(((made - wanted) ** 2 @ counts).sum())


def _least(pairs: Floats, errors: Floats) -> tuple[Floats, float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])
