"""What QuantizeLinear and DequantizeLinear make of values, with scale and zero point as ONNX Runtime's quantizer takes
them from a range."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.range_method import Grid
from edgeq.calibrate.ranges import Range

Floats = NDArray[np.float64]


def scale_and_zero(chosen: Range, grid: Grid) -> tuple[float, int]:
    """(scale, zero point) for a range; the scale is 0 for an empty one."""
    low, high = (-chosen.bound, chosen.bound) if grid.symmetric else (chosen.low, chosen.high)
    scale = (high - low) / (grid.most - grid.least)
    if scale <= 0:
        return 0.0, grid.least
    middle = np.rint((grid.least + grid.most) / 2)
    zero = middle if grid.symmetric else np.clip(np.rint(grid.least - low / scale), grid.least, grid.most)
    return scale, int(zero)


def steps(values: NDArray[Any], chosen: Range, grid: Grid) -> NDArray[np.intp]:
    """The integers that values become, counted from the least."""
    scale, zero = scale_and_zero(chosen, grid)
    if not scale:
        return np.zeros(values.shape, np.intp)
    integers = np.clip(np.rint(values / scale) + zero, grid.least, grid.most) - grid.least
    return np.asarray(integers, np.intp)


def levels(chosen: Range, grid: Grid) -> Floats:
    """What each integer stands for, from the least to the most."""
    scale, zero = scale_and_zero(chosen, grid)
    return np.asarray((np.arange(grid.least, grid.most + 1) - zero) * scale, np.float64)


def rounded(values: NDArray[Any], chosen: Range, grid: Grid) -> Floats:
    """Values quantized over a range and back."""
    return levels(chosen, grid)[steps(values, chosen, grid)]
