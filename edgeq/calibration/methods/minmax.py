"""Choose the smallest and the largest value of all samples. Values seen in calibration are never clipped."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import TensorStatistics
from edgeq.model.quant_params import Grid


def _range(tensor: TensorStatistics, grid: Grid, options: Mapping[str, float]) -> tuple[float, float]:
    return tensor.minimum, tensor.maximum


METHOD = RangeMethod("minmax", "the extrema of all samples", _range)
