"""From statistics to ranges, by every method, without running the model again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgeq.calibrate.histogram import linear_of
from edgeq.calibrate.methods import REGISTRY
from edgeq.calibrate.range_method import Grid, RangeMethod, grid_of
from edgeq.calibrate.statistics import Statistics, TensorStatistics
from edgeq.errors import CalibrationError
from edgeq.scheme import IntegerType, Scheme


@dataclass(frozen=True)
class Range:
    """The real values that an integer type is to cover; low ≤ 0 ≤ high.

    Attributes:
        kept: whether the step is that of a model which was quantized already, and has to stay.
    """

    low: float
    high: float
    kept: bool = False

    @property
    def bound(self) -> float:
        """The largest magnitude."""
        return max(-self.low, self.high)


def derive_ranges(
    statistics: Statistics,
    method: str = "minmax",
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
    options: Mapping[str, float] | None = None,
) -> dict[str, Range]:
    """One range per tensor.

    Args:
        method: the name of a registered calibration method (`edgeq.calibrate.methods`).
        activation_type, symmetric: the integers that the range will be mapped to. With `symmetric` every range is
            -bound..bound.
        options: of the method, for example {"percentile": 99.9} of "percentile"; else their defaults.

    Returns:
        Ranges by tensor name; zero is inside each. A tensor that never had an element has 0..0.

    Raises:
        UsageError: an unknown method or option, or an option out of its bounds.
        CalibrationError: the statistics are unfinished in a way that some tensors saw fewer samples.
    """
    chosen = REGISTRY.load(method)
    settings = chosen.settings(options or {})
    levels = grid_of(activation_type, symmetric)
    tensors = statistics.tensors
    for name, tensor in tensors.items():
        if tensor.samples != statistics.samples:
            raise CalibrationError(
                f"the statistics of tensor {name!r} are unfinished", "Finish the calibration with --resume"
            )
    # Rearranged tensors share one histogram object, and with it the answer.
    same = {name: (id(t.histogram), t.minimum, t.maximum, t.minimum_sum, t.maximum_sum) for name, t in tensors.items()}
    distinct = {same[name]: tensor for name, tensor in tensors.items()}
    found = {key: _range(tensor, chosen, levels, settings) for key, tensor in distinct.items()}
    return {name: found[same[name]] for name in tensors}


def scheme_ranges(statistics: Statistics, scheme: Scheme) -> dict[str, Range]:
    """`derive_ranges` by the method of a scheme, for the integers that its activations become."""
    return derive_ranges(
        statistics,
        scheme.method,
        activation_type=scheme.activation_type,
        symmetric=scheme.activation_symmetric,
        options=scheme.method_options,
    )


def _range(tensor: TensorStatistics, method: RangeMethod, grid: Grid, options: Mapping[str, float]) -> Range:
    if not tensor.count:
        return Range(0.0, 0.0)
    low, high = method.range(tensor, grid, options)
    # A bin reaches further than the outermost value in it.
    low, high = max(low, tensor.minimum), min(high, tensor.maximum)
    low, high = min(low, 0.0), max(high, 0.0)
    if grid.symmetric:
        bound = max(-low, high)
        return Range(-bound, bound)
    return Range(low, high)


def clipped_power(statistics: Statistics, ranges: Mapping[str, Range]) -> dict[str, float]:
    """Tensor → power of the clipping error over the tensor's power, 0 to 1, from its histogram.

    sum n (x - clip(x))^2 / sum n x^2 over bins of n values around x. Ranges of tensors without statistics are left out.
    """
    found = {}
    for name, span in ranges.items():
        tensor = statistics.tensors.get(name)
        if tensor is None or not tensor.count:
            continue
        if span.low <= tensor.minimum and tensor.maximum <= span.high:
            found[name] = 0.0
            continue
        linear = linear_of(tensor.histogram)
        centres = linear.centres()
        power = float(np.sum(linear.counts * centres**2))
        cut = centres - np.clip(centres, span.low, span.high)
        found[name] = float(np.sum(linear.counts * cut**2)) / power if power else 0.0
    return found


def range_noise(statistics: Statistics, ranges: Mapping[str, Range], grid: Grid) -> dict[str, float]:
    """Tensor → power of the error of quantizing it over the tensor's power: what clipping removes, and a twelfth of the
    squared step."""
    found = clipped_power(statistics, ranges)
    for name, clipped in found.items():
        linear = linear_of(statistics.tensors[name].histogram)
        power = float(np.sum(linear.counts * linear.centres() ** 2)) / max(float(linear.counts.sum()), 1.0)
        step = float(grid.params(ranges[name].low, ranges[name].high).scale)
        found[name] = clipped + (step**2 / 12 / power if power else 0.0)
    return found
