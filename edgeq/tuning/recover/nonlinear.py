"""Choose ranges of tensors before a non-linear function for the least error after the function, not before it.

A convolution before SiLU may range from -139 to 23, and SiLU maps everything below -8 to nearly zero. Quantization
steps below -8 are wasted. So the search minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

Here f is everything that follows element by element (`Followers`), whatever its operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgeq.calibration.methods.mse import COARSE, REFINEMENTS
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import TensorStatistics, linear_of
from edgeq.model.quant_params import Grid
from edgeq.tuning.recover.layers import Floats

if TYPE_CHECKING:
    pass
from edgeq.tuning.recover.followers import Function

_MAX_BINS = 1024
"""Largest number of histogram bins to evaluate. Neighbouring bins are joined until there are no more than this."""


def find_range_before(tensor: TensorStatistics, function: Function, grid: Grid) -> Range | None:
    """Return the range of `tensor` with the least expected squared error after `function`. Return None if the function
    is not finite (a logarithm, a reciprocal), because the error is undefined then.

    Args:
        grid: the integers that the range is mapped to.
    """
    # Zero is always in the range, because padding and Relu need it exactly.
    low, high = min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)
    if not tensor.count or low == high:
        return Range(0.0, 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high
    centres, counts = join_bins(*_filled_bins(tensor))
    targets = function(centres)
    if not np.isfinite(targets).all():
        return None

    def errors(shares: Floats) -> Floats:
        """Return the weighted squared error for n ranges: float[n]. Each row of `shares` contains factors by which the
        two ends of the whole range are multiplied.
        """
        sums = [_measure_error(centres, counts, targets, function, Range(low * a, high * b), grid) for a, b in shares]
        return np.array(sums)

    one_side = np.ones(1)
    # A side without values, or one that symmetry ties to the other, is not searched.
    lows = COARSE if low < 0 and not grid.symmetric else one_side
    highs = COARSE if high > 0 else one_side
    pairs = np.array([(b if grid.symmetric else a, b) for a in lows for b in highs])
    best, lowest_error = _pick_best(pairs, errors(pairs))
    for factor in REFINEMENTS:
        around = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * around, 1.0) if lows.size > 1 else one_side
        b = np.minimum(best[1] * around, 1.0) if highs.size > 1 else one_side
        pairs = np.array([(y if grid.symmetric else x, y) for x in a for y in b])
        candidate, error = _pick_best(pairs, errors(pairs))
        if error < lowest_error:
            best, lowest_error = candidate, error
    if not np.isfinite(lowest_error):
        return None
    return Range(float(low * best[0]), float(high * best[1]))


def join_bins(centres: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Join neighbouring bins until there are at most `_MAX_BINS`. The centre of joined bins is a mean weighted by
    count.
    """
    # Joining pairs halves the number and keeps means, so no value moves far.
    while len(centres) > _MAX_BINS:
        if len(centres) % 2:
            centres, counts = np.append(centres, centres[-1]), np.append(counts, 0.0)
        pairs, weights = centres.reshape(-1, 2), counts.reshape(-1, 2)
        counts = weights.sum(1)
        centres = np.where(counts > 0, (pairs * weights).sum(1) / np.maximum(counts, 1e-300), pairs.mean(1))
    return centres, counts


def _filled_bins(tensor: TensorStatistics) -> tuple[Floats, Floats]:
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    return linear.centres()[filled], linear.counts[filled]


def _measure_error(
    centres: Floats, counts: Floats, targets: Floats, function: Function, span: Range, grid: Grid
) -> float:
    """Return the summed squared error. The function is evaluated once for each integer, not for each bin."""
    params = grid.params(span.low, span.high)
    levels = params.dequantize(np.arange(params.low, params.high + 1))
    outputs = function(levels)[:, params.quantize(centres).astype(np.intp) - params.low]
    if not np.isfinite(outputs).all():
        return np.inf
    return float(((outputs - targets) ** 2 @ counts).sum())


def _pick_best(pairs: Floats, errors: Floats) -> tuple[Floats, float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])
