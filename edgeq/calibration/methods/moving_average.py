"""Choose the averages of the samples' minima and maxima. These averages do not depend on the order of the samples."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import TensorStatistics, mean_of_units
from edgeq.model.quant_params import Grid


def _range(tensor: TensorStatistics, grid: Grid, options: Mapping[str, float]) -> tuple[float, float]:
    low = mean_of_units(tensor.minimum_sum, tensor.nonempty)
    return low, mean_of_units(tensor.maximum_sum, tensor.nonempty)


METHOD = RangeMethod("moving-average", "the mean over samples of their extrema", _range, compared=False)
