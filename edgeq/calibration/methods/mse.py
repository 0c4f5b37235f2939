"""Choose the ranges with the smallest expected squared quantization error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import BINS, Float64s, Linear, TensorStatistics, linear_of
from edgeq.model.quant_params import Grid, QuantParams

# Half octaves, down to a 64th of the extrema.
COARSE = 2.0 ** (-np.arange(13) / 2.0)
"""Shares of the extrema that are tried first. The best share is then refined with smaller and smaller factors."""
REFINEMENTS = 2.0 ** (-1.0 / np.array([4.0, 8.0, 16.0, 32.0, 64.0]))

PRELIMINARY = 16
"""Number of ranges that are tried first. Their errors show that most of the other ranges can be skipped."""
ROUNDING = 1e-9
"""Tolerance for rounding when errors of ranges are compared, relative to the power of all values."""


def mse_range(linear: Linear, minimum: float, maximum: float, grid: Grid) -> tuple[float, float]:
    """Return the range that gives the smallest squared error when the histogram is quantized. edgeq first searches a
    coarse grid of ranges, then refines the best range.

    If the data have both signs, both ends are searched. For a symmetric grid, or for data of one sign, one end is
    enough.
    """
    low, high = min(minimum, 0.0), max(maximum, 0.0)
    bound = max(-low, high)
    # All values are zero, and any range represents them.
    if bound == 0.0:
        return 0.0, 0.0
    if grid.symmetric:
        low, high = -bound, bound
    # Computed once, because the search tries more than a hundred ranges.
    moments = moments_of(linear)
    search_low, search_high = low < 0.0, high > 0.0 and not grid.symmetric
    lows = COARSE if search_low else np.ones(1)
    highs = COARSE if search_high else np.ones(1)
    share = np.array([(a, b) for a in lows for b in highs])
    best, best_error = _best_share(moments, _promising(moments, share, low, high, grid), low, high, grid)
    # Each round halves the distance between neighbours, in octaves, around the best range so far.
    for factor in REFINEMENTS:
        steps = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * steps, 1.0) if search_low else np.ones(1)
        b = np.minimum(best[1] * steps, 1.0) if search_high else np.ones(1)
        candidate, error = _best_share(moments, np.array([(x, y) for x in a for y in b]), low, high, grid)
        if error < best_error:
            best, best_error = candidate, error
    if grid.symmetric:
        return float(low * best[0]), float(high * best[0])
    return float(low * best[0]), float(high * best[1])


@dataclass(frozen=True, eq=False)
class BinMoments:
    """Hold running sums over the bins: of counts, of counts × target, and of counts × target². The target of a bin is
    the number that its values should become: its centre, or the centre after a function.

    Each array is float64[2 × BINS + 1].
    """

    counts: Float64s
    totals: Float64s
    squares: Float64s
    width: float


def moments_of(linear: Linear, targets: Float64s | None = None) -> BinMoments:
    """Return the running sums of a histogram. From them `squared_errors` computes the error of any range.

    Args:
        targets: float64[2 × BINS], the target of each bin; None for the centres.
    """
    targets = linear.centres() if targets is None else targets
    weighted = linear.counts * targets
    return BinMoments(_running(linear.counts), _running(weighted), _running(weighted * targets), linear.width)


def levels_of(params: QuantParams) -> Float64s:
    """Return, for each of several scales, the numbers that the integers represent: float64[scales, levels]."""
    levels: Float64s = (np.arange(params.low, params.high + 1) - params.zero_point[:, None]) * params.scale[:, None]
    return levels


def squared_errors(moments: BinMoments, params: QuantParams, results: Float64s | None = None) -> Float64s:
    """Return, for each of several scales, the summed squared error of the bins' targets.

    The values that are rounded to a level are between two midpoints. So the running sums give the error of a scale in
    O(levels).

    Args:
        results: float64[scales, levels], the number that each level becomes; None for the levels themselves.
    """
    levels = levels_of(params)
    midpoints = (levels[:, :-1] + levels[:, 1:]) / 2
    inner = np.ceil(midpoints / moments.width - 0.5).clip(-BINS, BINS).astype(np.int64) + BINS
    count, moment = (_between(sums, inner) for sums in (moments.counts, moments.totals))
    results = levels if results is None else results
    errors: Float64s = moments.squares[-1] + np.einsum("ij,ij->i", results, results * count - 2 * moment)
    return errors


def _best_share(
    moments: BinMoments, share: Float64s, low: float, high: float, grid: Grid
) -> tuple[tuple[float, float], float]:
    errors = squared_errors(moments, grid.params(*_ends(share, low, high, grid)))
    place = int(np.argmin(errors))
    return (float(share[place, 0]), float(share[place, 1])), float(errors[place])


def _promising(moments: BinMoments, share: Float64s, low: float, high: float, grid: Grid) -> Float64s:
    """Return the rows of `share` without those whose range cannot be best. Each row gives a range as shares of `low`
    and `high`.

    edgeq first computes the total error of the `PRELIMINARY` ranges that clip least. A range cannot be best if its
    clipping error alone exceeds the smallest of these errors.
    """
    # With few candidates, ruling some out takes longer than trying them.
    if len(share) <= PRELIMINARY:
        return share
    clipped = clipped_errors(moments, grid.params(*_ends(share, low, high, grid)))
    _, error = _best_share(moments, share[np.argsort(clipped)[:PRELIMINARY]], low, high, grid)
    candidates: Float64s = share[clipped <= error + ROUNDING * moments.squares[-1]]
    return candidates


def _ends(share: Float64s, low: float, high: float, grid: Grid) -> tuple[Float64s, Float64s]:
    return low * share[:, 0], high * share[:, 0 if grid.symmetric else 1]


def clipped_errors(moments: BinMoments, params: QuantParams) -> Float64s:
    """Return the clipping error for each of several scales. It is the summed squared error of the bin centres beyond
    the outermost levels.
    """
    ends = (np.array([[params.low], [params.high]]) - params.zero_point) * params.scale
    place = np.ceil(ends / moments.width - 0.5).clip(-BINS, BINS).astype(np.int64) + BINS
    count, total, square = (
        np.stack([sums[place[0]], sums[-1] - sums[place[1]]])
        for sums in (moments.counts, moments.totals, moments.squares)
    )
    errors: Float64s = (square + ends * (ends * count - 2 * total)).sum(axis=0)
    return errors


def _between(sums: Float64s, inner: np.ndarray) -> Float64s:
    """Return the sum for each level, computed from running sums. The first and the last level extend to infinity."""
    at = sums[inner]
    level_sums = np.empty((inner.shape[0], inner.shape[1] + 1))
    level_sums[:, 0] = at[:, 0]
    np.subtract(at[:, 1:], at[:, :-1], out=level_sums[:, 1:-1])
    level_sums[:, -1] = sums[-1] - at[:, -1]
    return level_sums


def _running(values: Float64s) -> Float64s:
    return np.concatenate([[0.0], np.cumsum(values)])


def _range(tensor: TensorStatistics, grid: Grid, options: Mapping[str, float]) -> tuple[float, float]:
    return mse_range(linear_of(tensor.histogram), tensor.minimum, tensor.maximum, grid)


METHOD = RangeMethod("mse", "the range with the least squared quantization error", _range)
