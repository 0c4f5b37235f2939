"""Turn the scales of Q/DQ pairs into the factors of ncnn's int8 layers.

ncnn rounds a layer's input, sums integers in 32 bits, and returns floats:

    q = clip(round_half_away(x * input), -127, 127)        y = sum * 1 / (input * weights) + bias

All factors are float32. Both formulas were read in ncnn and executed: docs/reference/ncnn.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.lower import NotInNcnnError
from edgeq.backends.ncnn.network import LayerScales
from edgeq.model.quant_params import QuantParams

_MOST = 127


def layer_scales(
    integers: NDArray[Any], weight_params: QuantParams, input_params: QuantParams, axis: int, group: int
) -> tuple[NDArray[np.int8], LayerScales]:
    """Return the weights of an int8 layer as int8, and its factors.

    Args:
        integers: weights as the model stores them.
        axis: their axis of output channels.
        group: number of channel groups of a convolution.

    Raises:
        NotInNcnnError: ncnn has no int8 form with these scales.
    """
    input_factor = factor_of(input_params)
    weights = centred(integers, weight_params)
    count = weights.shape[axis]
    scale = weight_params.scale.ravel().astype(np.float64)
    if scale.size not in (1, count) or (scale.size > 1 and weight_params.axis % integers.ndim != axis):
        raise NotInNcnnError("its weights have scales on another axis than that of its output channels")
    if group > 1 and count != group and scale.size > 1:
        raise NotInNcnnError("ncnn has one weight scale for each group, and its groups have several channels")
    factors = np.broadcast_to((1 / scale).astype(np.float32), group if group > 1 else count)
    # A factor of 0 would mark a channel without weights, for which some of ncnn's kernels divide by it.
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise NotInNcnnError("a weight scale is not a positive number that float32 can invert")
    return weights, LayerScales(np.ascontiguousarray(factors), input_factor)


def factor_of(params: QuantParams) -> np.float32:
    """Return the factor by which ncnn multiplies an activation before it rounds.

    Raises:
        NotInNcnnError: the activation has several scales, or a zero point.
    """
    if params.per_channel or params.block:
        raise NotInNcnnError("its input has several scales")
    if params.dtype not in (ir.DataType.INT8, ir.DataType.UINT8) or int(params.zero_point.reshape(())) != _middle(
        params
    ):
        raise NotInNcnnError("its input has a zero point, or integers of other than 8 bits; ncnn's int8 is symmetric")
    factor = np.float32(1 / params.scale.reshape(()).astype(np.float64))
    if not (np.isfinite(factor) and factor > 0):
        raise NotInNcnnError("the scale of its input is not a positive number that float32 can invert")
    return factor


def centred(integers: NDArray[Any], params: QuantParams) -> NDArray[np.int8]:
    """Return symmetric weights as int8.

    Raises:
        NotInNcnnError: the weights have a zero point.
    """
    if params.block or params.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
        raise NotInNcnnError(f"its weights are of type {params.dtype}")
    if (params.zero_point.astype(np.int64) != _middle(params)).any():
        raise NotInNcnnError("its weights have a zero point; ncnn's int8 is symmetric")
    centred_values = integers.astype(np.int16) - _middle(params)
    # ncnn's kernels assume that no weight is -128.
    return np.clip(centred_values, -_MOST, _MOST).astype(np.int8)


def _middle(params: QuantParams) -> int:
    return 128 if params.dtype == ir.DataType.UINT8 else 0
