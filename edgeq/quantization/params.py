"""Choose the scales and zero points of activations and weights, in the same way as ONNX Runtime's quantizer:

activations    scale = (high - low) / steps, zero point = round(smallest - low / scale)
weights        scale = largest magnitude / largest integer, zero point 0, if they are symmetric

For hardware that rescales by shifts, each scale is then rounded up to a power of two (`fit_scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibration.ranges import Range
from edgeq.model.graph import name_of
from edgeq.model.quant_params import LIMITS, Grid, QuantParams, fit_scale
from edgeq.scheme import IntegerType, ScaleForm, Scheme

# Smaller scales are subnormal float32 numbers, which processors may treat as zero.
_MIN_SCALE = float(np.finfo(np.float32).tiny)


def integer_type(name: IntegerType) -> ir.DataType:
    """Return the ONNX element type for "int8" or "uint8", the names that a scheme uses."""
    return ir.DataType[name.upper()]


def activation_params(span: Range, dtype: ir.DataType, *, symmetric: bool, form: ScaleForm = "any") -> QuantParams:
    """Return the parameters (float32 scale) of an activation whose values are in the range `span`.

    An empty range gets scale 1. Unless `symmetric`, its zero point is the smallest integer, which leaves all levels to
    positive values. If the samples showed only zeros, other values are more likely positive, as after a Relu that let
    nothing through.
    """
    low, high = np.float32(span.low), np.float32(span.high)
    params = Grid(dtype, symmetric, form).params(float(low), float(high))
    if float(params.scale) >= _MIN_SCALE:
        return replace(params, scale=params.scale.astype(np.float32))
    zero = params.zero_point if symmetric else np.asarray(LIMITS[dtype][0])
    return replace(params, scale=np.asarray(1, np.float32), zero_point=zero)


def is_spread_thin(softmax: Range) -> bool:
    """Return whether a Softmax with this range has so many elements that a scale of 1/255 would leave it few levels.

    A Softmax over few elements can return any value up to 1, whatever the samples showed.
    """
    return softmax.high < 1 / 2


def scheme_params(span: Range, scheme: Scheme) -> QuantParams:
    """Return `activation_params` for the activation type, the symmetry and the form of scales of a scheme."""
    dtype = integer_type(scheme.activation_type)
    return activation_params(span, dtype, symmetric=scheme.activation_symmetric, form=scheme.scale)


def weight_params(
    weight: NDArray[np.float32], axis: int | None, scheme: Scheme, bound: NDArray[np.floating] | None = None
) -> QuantParams:
    """Return the parameters (float32 scale) of a weight.

    Args:
        axis: axis of the channels if each channel has its own scale; None for one scale. Scales per channel are
            symmetric.
        bound: magnitude that the largest integer represents, for each channel or one for all. If it is None, the
            largest magnitude of the weight is used.
    """
    dtype = integer_type(scheme.weight_type)
    symmetric = axis is not None or scheme.weight_symmetric
    lowest, highest = LIMITS[dtype]
    if scheme.reduce_range or symmetric:
        lowest, highest = weight_limits(scheme.weight_type, scheme.reduce_range)
    reduced_axes = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    low = np.minimum(weight.min(axis=reduced_axes, initial=0), 0).astype(np.float64)
    high = np.maximum(weight.max(axis=reduced_axes, initial=0), 0).astype(np.float64)
    if symmetric or bound is not None:
        high = np.maximum(-low, high) if bound is None else np.asarray(bound, np.float64)
        low = -high
    scale = (high - low) / (highest - lowest)
    scale = fit_scale(np.where(scale < _MIN_SCALE, 1.0, scale), scheme.scale)
    middle = np.full(scale.shape, np.rint((lowest + highest) / 2))
    zero = middle if symmetric else np.clip(np.rint(lowest - low / scale), lowest, highest)
    return QuantParams(
        scale.astype(np.float32), zero.astype(np.int64), dtype, axis=axis or 0, narrow=lowest == -LIMITS[dtype][1]
    )


def weight_limits(weight_type: str, reduce_range: bool) -> tuple[int, int]:
    """Return the smallest and the largest integer that ONNX Runtime's quantizer uses for symmetric weights.

    Args:
        weight_type: "int8" or "uint8".
        reduce_range: whether weights have 7 bits.
    """
    if weight_type == "int8":
        return (-64, 64) if reduce_range else (-127, 127)
    return (0, 127) if reduce_range else (0, 255)


# Smallest width of a range. The scale of a narrower range cannot be represented in float32 with full accuracy.
_MIN_WIDTH = 2.0**-100


def range_params(
    ranges: Mapping[str, Range], dtype: ir.DataType, *, symmetric: bool
) -> Callable[[ir.Value], QuantParams | None]:
    """Return a function from a tensor to the parameters that onnxruntime's quantizer derives from `ranges`.

    The function returns None for a tensor whose range is missing or empty; the quantizer gives such a tensor scale 1
    and zero point 0. It also returns None for integer types that `edgeq.model.quant_params` does not list.
    """

    def params_of(value: ir.Value) -> QuantParams | None:
        """Return the parameters of one tensor, or None."""
        span = ranges.get(name_of(value))
        if span is None or dtype not in LIMITS or span.high - span.low < _MIN_WIDTH:
            return None
        return activation_params(span, dtype, symmetric=symmetric)

    return params_of
