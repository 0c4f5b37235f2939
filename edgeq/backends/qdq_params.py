"""Choose the scale and zero point of a tensor that is written as integers, as ONNX Runtime's quantizer chooses them.

activations    scale = (high - low) / steps, zero point = round(smallest - low / scale)
weights        scale = largest magnitude / largest integer, zero point 0, where they are symmetric
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibrate.ranges import Range
from edgeq.graph.quant_params import LIMITS, QuantParams
from edgeq.scheme import IntegerType, Scheme

# Scales below are float32's subnormal numbers, which processors may take for zero.
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


def integer_type(name: IntegerType) -> ir.DataType:
    """Return the element type that a scheme calls "int8" or "uint8"."""
    return ir.DataType[name.upper()]


def activation_params(found: Range, dtype: ir.DataType, *, symmetric: bool) -> QuantParams:
    """Return the parameters (float32 scale) of an activation with values in `found`.

    An empty range gets scale 1, and unless `symmetric` the smallest integer as its zero point: what the samples never
    showed is likelier to be positive, as behind a Relu that let nothing through.
    """
    low, high = np.float32(found.low), np.float32(found.high)
    narrow = symmetric and LIMITS[dtype][0] < 0
    made = QuantParams.from_range(float(low), float(high), dtype, symmetric=symmetric, narrow=narrow)
    if float(made.scale) >= _LEAST_SCALE:
        return replace(made, scale=made.scale.astype(np.float32))
    zero = made.zero_point if symmetric else np.asarray(LIMITS[dtype][0])
    return replace(made, scale=np.asarray(1, np.float32), zero_point=zero)


def spreads_thin(softmax: Range) -> bool:
    """Return whether a Softmax, by the range of its result, is over so much that a scale of 1/255 would leave it few
    levels. One over few elements may give any value up to 1, whatever the samples gave."""
    return softmax.high < 1 / 2


def scheme_params(found: Range, scheme: Scheme) -> QuantParams:
    """Return `activation_params` with the types of a scheme."""
    return activation_params(found, integer_type(scheme.activation_type), symmetric=scheme.activation_symmetric)


def weight_params(
    weight: NDArray[np.float32], axis: int | None, scheme: Scheme, bound: NDArray[np.floating] | None = None
) -> QuantParams:
    """Return the parameters (float32 scale) of a weight.

    Args:
        axis: of the channels that have a scale each; None for one scale. Scales per channel are symmetric.
        bound: magnitudes that the largest integer stands for, one per channel or one; None takes the weight's largest.
    """
    dtype = integer_type(scheme.weight_type)
    symmetric = axis is not None or scheme.weight_symmetric
    least, most = LIMITS[dtype]
    if scheme.reduce_range:
        least, most = (0, 127) if least == 0 else (-64, 64)
    elif symmetric and least < 0:
        least = -most
    others = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    low = np.minimum(weight.min(axis=others, initial=0), 0).astype(np.float64)
    high = np.maximum(weight.max(axis=others, initial=0), 0).astype(np.float64)
    if symmetric or bound is not None:
        high = np.maximum(-low, high) if bound is None else np.asarray(bound, np.float64)
        low = -high
    scale = (high - low) / (most - least)
    scale = np.where(scale < _LEAST_SCALE, 1.0, scale)
    middle = np.full(scale.shape, np.rint((least + most) / 2))
    zero = middle if symmetric else np.clip(np.rint(least - low / scale), least, most)
    return QuantParams(
        scale.astype(np.float32), zero.astype(np.int64), dtype, axis=axis or 0, narrow=least == -LIMITS[dtype][1]
    )
