"""From statistics to ranges, by every method, without running the model again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.entropy import entropy_range
from edgeq.calibrate.linear import linear_of
from edgeq.calibrate.mse import Grid, grid_of, mse_range
from edgeq.calibrate.percentile import percentile_range
from edgeq.calibrate.statistics import Statistics, TensorStatistics, mean_of_units
from edgeq.errors import CalibrationError, UsageError
from edgeq.scheme import IntegerType, Method

OPTIONS: Mapping[Method, Mapping[str, float]] = {
    "minmax": {},
    "moving-average": {},
    "percentile": {"percentile": 99.99},
    "entropy": {},
    "mse": {},
}
"""The options of each method and their defaults."""


@dataclass(frozen=True)
class Range:
    """The real values that an integer type is to cover; low ≤ 0 ≤ high."""

    low: float
    high: float

    @property
    def bound(self) -> float:
        """The largest magnitude."""
        return max(-self.low, self.high)


def derive_ranges(
    statistics: Statistics,
    method: Method = "minmax",
    *,
    activation_type: IntegerType = "uint8",
    symmetric: bool = False,
    options: Mapping[str, float] | None = None,
) -> dict[str, Range]:
    """One range per tensor.

    Args:
        method: "minmax"; "moving-average" (means over samples of their extrema, in any order); "percentile";
            "entropy"; "mse".
        activation_type, symmetric: the integers that the range will be mapped to. With `symmetric` every range is
            -bound..bound. minmax, moving-average and percentile do not depend on the type.
        options: "percentile": {"percentile": p} keeps p percent of the values (99.99).

    Returns:
        Ranges by tensor name; zero is inside each. A tensor that never had an element has 0..0.

    Raises:
        UsageError: an unknown method or option, or an option out of its bounds.
        CalibrationError: the statistics are unfinished in a way that some tensors saw fewer samples.
    """
    chosen = _options(method, dict(options or {}))
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
    found = {key: _range(tensor, method, levels, chosen) for key, tensor in distinct.items()}
    return {name: found[same[name]] for name in tensors}


def channel_ranges(
    statistics: Statistics, name: str, *, symmetric: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(low, high), float32[channels] each, by minmax, of a tensor that was collected per channel. Zero is inside."""
    channels = statistics.tensors[name].channels
    if channels is None:
        raise CalibrationError(
            f"tensor {name!r} was not collected per channel", "Name its channel axis when collecting"
        )
    zero = np.float32(0)
    low, high = np.minimum(channels.minimum, zero), np.maximum(channels.maximum, zero)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    return low, high


def _range(tensor: TensorStatistics, method: Method, grid: Grid, options: Mapping[str, float]) -> Range:
    if not tensor.count:
        return Range(0.0, 0.0)
    low, high = tensor.minimum, tensor.maximum
    if method == "moving-average":
        low = mean_of_units(tensor.minimum_sum, tensor.nonempty)
        high = mean_of_units(tensor.maximum_sum, tensor.nonempty)
    elif method == "percentile":
        low, high = percentile_range(tensor.histogram, options["percentile"], symmetric=grid.symmetric)
    elif method == "entropy":
        levels = grid.most - grid.least + 1
        low, high = entropy_range(linear_of(tensor.histogram), levels=levels, symmetric=grid.symmetric)
    elif method == "mse":
        low, high = mse_range(linear_of(tensor.histogram), low, high, grid)
    # A bin reaches further than the outermost value in it.
    low, high = max(low, tensor.minimum), min(high, tensor.maximum)
    low, high = min(low, 0.0), max(high, 0.0)
    if grid.symmetric:
        bound = max(-low, high)
        return Range(-bound, bound)
    return Range(low, high)


def _options(method: str, given: dict[str, float]) -> dict[str, float]:
    if method not in get_args(Method):
        raise UsageError(f"calibration method {method!r} is not known", f"Known: {', '.join(get_args(Method))}")
    known = OPTIONS[method]  # type: ignore[index]
    for name, value in given.items():
        if name not in known:
            takes = f"It takes: {', '.join(known)}" if known else "It takes none"
            raise UsageError(f"calibration method {method} has no option {name!r}", takes)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"calibration option {name} is {value!r}", "It is a finite number")
    return {**known, **given}
