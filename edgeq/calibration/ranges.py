"""Derive ranges from statistics with any method, without running the model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgeq.calibration.methods import REGISTRY
from edgeq.calibration.range_method import RangeMethod
from edgeq.calibration.statistics import Statistics, TensorStatistics, linear_of
from edgeq.errors import CalibrationError
from edgeq.model.quant_params import Grid, grid_of
from edgeq.scheme import IntegerType, ScaleForm, Scheme


@dataclass(frozen=True)
class Range:
    """Hold the range of real values that an integer type must cover; low ≤ 0 ≤ high.

    Attributes:
        fixed_step: whether the step must not change because it comes from a model that was already quantized.
    """

    low: float
    high: float
    fixed_step: bool = False

    @property
    def bound(self) -> float:
        """Return the largest magnitude in the range."""
        return max(-self.low, self.high)


def derive_ranges(
    statistics: Statistics,
    method: str = "minmax",
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
    form: ScaleForm = "any",
    options: Mapping[str, float] | None = None,
) -> dict[str, Range]:
    """Return one range per tensor.

    Args:
        method: name of a registered calibration method (`edgeq.calibration.methods`).
        activation_type, symmetric: integer type that the range will be mapped to. With `symmetric` every range is
            -bound..bound.
        form: the form of the scales.
        options: options of the method, for example {"percentile": 99.9} for "percentile"; missing options get their
            defaults.

    Returns:
        Ranges by tensor name. Each includes zero. The range of a tensor without elements is 0..0.

    Raises:
        UsageError: the method or an option is unknown, or an option is out of bounds.
        CalibrationError: the statistics are unfinished: some tensors have seen fewer samples than others.
    """
    range_method = REGISTRY.load(method)
    settings = range_method.settings(options or {})
    levels = grid_of(activation_type, symmetric, form)
    tensors = statistics.tensors
    for name, tensor in tensors.items():
        if tensor.samples != statistics.samples:
            raise CalibrationError(
                f"the statistics of tensor {name!r} are unfinished", "Finish the calibration with ⟨resume=True⟩"
            )
    # Rearranged tensors share one histogram object. Their range is computed only once.
    keys = {name: (id(t.histogram), t.minimum, t.maximum, t.minimum_sum, t.maximum_sum) for name, t in tensors.items()}
    distinct = {keys[name]: tensor for name, tensor in tensors.items()}
    ranges_by_key = {key: _range(tensor, range_method, levels, settings) for key, tensor in distinct.items()}
    return {name: ranges_by_key[keys[name]] for name in tensors}


def scheme_ranges(statistics: Statistics, scheme: Scheme) -> dict[str, Range]:
    """Return the ranges that the method of a scheme chooses for the scheme's activation type."""
    return derive_ranges(
        statistics,
        scheme.method,
        activation_type=scheme.activation_type,
        symmetric=scheme.activation_symmetric,
        form=scheme.scale,
        options=scheme.method_options,
    )


def _range(tensor: TensorStatistics, method: RangeMethod, grid: Grid, options: Mapping[str, float]) -> Range:
    if not tensor.count:
        return Range(0.0, 0.0)
    low, high = method.range(tensor, grid, options)
    # A bin may extend beyond the outermost value in it.
    low, high = max(low, tensor.minimum), min(high, tensor.maximum)
    low, high = min(low, 0.0), max(high, 0.0)
    if grid.symmetric:
        bound = max(-low, high)
        return Range(-bound, bound)
    return Range(low, high)


def clipped_power(statistics: Statistics, ranges: Mapping[str, Range]) -> dict[str, float]:
    """Return, for each tensor, the power of its clipping error divided by the power of the tensor: a number from 0 to
    1.

    The ratio is sum n (x - clip(x))^2 / sum n x^2, where each bin of the histogram contains n values around x. Tensors
    without statistics are left out.
    """
    shares = {}
    for name, span in ranges.items():
        tensor = statistics.tensors.get(name)
        if tensor is None or not tensor.count:
            continue
        if span.low <= tensor.minimum and tensor.maximum <= span.high:
            shares[name] = 0.0
            continue
        linear = linear_of(tensor.histogram)
        centres = linear.centres()
        power = float(np.sum(linear.counts * centres**2))
        cut = centres - np.clip(centres, span.low, span.high)
        shares[name] = float(np.sum(linear.counts * cut**2)) / power if power else 0.0
    return shares
