"""Choose ranges of tensors before a non-linear function for the least error after the function, not before it.

A convolution before SiLU may range from -139 to 23, and SiLU maps everything below -8 to nearly zero. Quantization
steps below -8 are wasted. So the search minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

Here f is everything that follows element by element (`Followers`), whatever its operators. All ranges of a round are
evaluated in one expression: f is called once for the levels of all of them, and running sums over the bins give the
error of each level.
"""

from __future__ import annotations

import numpy as np

from edgeq.calibration.methods.mse import COARSE, REFINEMENTS, levels_of, moments_of, squared_errors
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import TensorStatistics, linear_of
from edgeq.model.quant_params import Grid
from edgeq.tuning.recover.followers import Function
from edgeq.tuning.recover.layers import Floats


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
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    # The function may be undefined where the tensor has no values, as a square root is below zero.
    computed = function(linear.centres()[filled])
    if not np.isfinite(computed).all():
        return None
    targets = np.zeros((len(computed), filled.size))
    targets[:, filled] = computed
    moments = [moments_of(linear, end) for end in targets]

    def errors(shares: Floats) -> Floats:
        """Return the weighted squared error for n ranges: float[n]. Each row of `shares` contains factors by which the
        two ends of the whole range are multiplied.
        """
        params = grid.params(low * shares[:, 0], high * shares[:, 1])
        levels = levels_of(params)
        results = function(levels.ravel()).reshape(-1, *levels.shape)
        finite = np.isfinite(results)
        ends = zip(moments, np.where(finite, results, 0.0), strict=True)
        sums = np.sum([squared_errors(end, params, result) for end, result in ends], axis=0)
        return np.where(finite.all((0, 2)), sums, np.inf)

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


def _pick_best(pairs: Floats, errors: Floats) -> tuple[Floats, float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])
