"""Choose ranges that keep a given share of the values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgeq.calibration.range_method import Option, RangeMethod
from edgeq.calibration.statistics import Histogram, TensorStatistics
from edgeq.model.quant_params import Grid


def percentile_range(histogram: Histogram, percentile: float, *, symmetric: bool) -> tuple[float, float]:
    """Return the range that keeps `percentile` percent of the values.

    Half of the removed values are at each end. With `symmetric`, the values with the largest magnitudes are removed
    instead, whichever end they are at. The exact order statistic is the smallest value v such that at least the wanted
    share of all values is less than or equal to v. Each end of the range is an edge of the bin that contains the order
    statistic, so the range includes it.

    Args:
        percentile: share in percent, above 0 and at most 100.
    """
    lower, upper = histogram.edges()
    total = histogram.total
    if symmetric:
        magnitudes = np.maximum(np.abs(lower), np.abs(upper))
        order = np.argsort(magnitudes, kind="stable")
        cumulated = np.cumsum(histogram.counts[order])
        bound = float(magnitudes[order][_place(cumulated, percentile / 100.0, total)])
        return -bound, bound
    cut = (100.0 - percentile) / 200.0
    cumulated = np.cumsum(histogram.counts)
    return float(lower[_place(cumulated, cut, total)]), float(upper[_place(cumulated, 1.0 - cut, total)])


def _place(cumulated: np.ndarray, share: float, total: int) -> int:
    """Return the index of the bin that contains the order statistic of rank ceil(share × total). The rank is at least
    1.
    """
    rank = max(1, int(np.ceil(share * total)))
    return int(np.searchsorted(cumulated, min(rank, total)))


def _range(tensor: TensorStatistics, grid: Grid, options: Mapping[str, float]) -> tuple[float, float]:
    return percentile_range(tensor.histogram, options["percentile"], symmetric=grid.symmetric)


METHOD = RangeMethod(
    "percentile",
    "the range that keeps a share of the values",
    _range,
    options=(Option("percentile", 99.99, "share of the values kept, in percent", above=0.0, most=100.0),),
    # These percentiles clip one value in 100 000, 10 000 and 1000.
    search=tuple({"percentile": share} for share in (99.999, 99.99, 99.9)),
)
