"""Fit biases into the integers in which the hardware stores them.

A bias has the scale of its input times the scale of its weight, so a larger scale of the weight makes the bias smaller.
If a bias does not fit, the scale of its weight grows just enough. With one scale for the whole weight, this costs the
accuracy of all channels. So a channel that saturates with a smaller bias as well does not count: its bias is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.quant_params import QuantParams, fit_scale
from edgeq.scheme import Scheme

WIDEST_BIAS: int = ir.DataType.INT32.bitwidth
"""Width of the biases in a file, in bits."""
# The scale of a bias is a rounded product of two float32 numbers, so the integers keep a margin. Powers of two do not
# need it.
_MARGIN = 1.0001


def largest_bias(scheme: Scheme) -> int:
    """Return the largest integer of a bias. A file has biases of at most 32 bits, whatever the hardware stores.

    With scales that are powers of two, a bias of 32 bits leaves one of them to the products. Hardware adds them to the
    bias in 32 bits, and a sum that does not fit wraps around.
    """
    bits = min(scheme.bias_bits, WIDEST_BIAS)
    return int(2 ** (bits - 1 - (bits == WIDEST_BIAS and scheme.scale != "any")) - 1)


def fit_to_bias(
    weight: QuantParams,
    bias: NDArray[np.float32],
    data: QuantParams,
    saturated: Callable[[QuantParams], NDArray[np.bool_]],
    scheme: Scheme,
) -> QuantParams:
    """Return the parameters of a weight, with scales so large that the bias of its layer fits.

    Args:
        weight, data: the parameters of the layer's weight, with zero point 0, and of its input.
        bias: in the shape of the weight's scales or, with one scale, in any shape.
        saturated: returns for given parameters of the weight whether each bias may be cut off (`saturates_anyway`), in
            a shape that broadcasts to the bias.
    """
    levels = largest_bias(scheme) / (_MARGIN if scheme.scale == "any" else 1.0)
    # With one scale, the largest number of the file decides, in its own type.
    largest = np.abs(bias.astype(np.float64)) if weight.scale.ndim else np.abs(bias).max(initial=0)
    if scheme.bias_bits >= WIDEST_BIAS:  # Only a broken model has a bias that does not fit.
        return _grown(weight, largest / levels / float(data.scale), scheme)
    needed = np.abs(bias.astype(np.float64)) / levels / float(data.scale)
    # Larger scales let more of the large biases be cut off. So each step is small, and the first that suffices is best.
    while True:
        too_large = (needed > weight.scale.astype(np.float64)) & ~saturated(weight)
        if not too_large.any():
            return weight
        wanted = np.where(too_large, needed, 0.0)
        wanted = np.minimum(wanted if weight.scale.ndim else wanted.max(), 2.0 * weight.scale.astype(np.float64))
        weight = _grown(weight, wanted, scheme)


def _grown(weight: QuantParams, scale: NDArray[Any], scheme: Scheme) -> QuantParams:
    """Return the parameters with scales that are not smaller than `scale`."""
    return replace(weight, scale=fit_scale(np.maximum(weight.scale, scale), scheme.scale).astype(np.float32))


def saturates_anyway(
    weight: QuantParams,
    values: NDArray[np.float32],
    axis: int,
    bias: NDArray[np.float32],
    data: QuantParams,
    result: tuple[float, float],
    scheme: Scheme,
) -> NDArray[np.bool_]:
    """Return for each output whether all its results are at one end of the range, with its bias and with the bias that
    is cut off to the largest integer, bool [outputs].

    Args:
        weight, data: the parameters of the layer's weight, with zero point 0, and of its input.
        values: the float weight, with outputs on `axis`.
        bias: float32 [outputs].
        result: the smallest and the largest number that the layer's result can represent.
    """
    integers = np.abs(np.moveaxis(weight.quantize(values).astype(np.int64), axis, 0).reshape(values.shape[axis], -1))
    scale = np.broadcast_to(weight.scale.astype(np.float64), (len(integers),)) * float(data.scale)
    # No sum of products is larger than this.
    reach = integers.sum(1) * scale * (max(np.abs(data.range)) / float(data.scale))
    limit = largest_bias(scheme) * scale
    below, above = (bias < -limit) & (reach - limit <= result[0]), (bias > limit) & (limit - reach >= result[1])
    return np.asarray(below | above, np.bool_)


def cut_bias(bias: NDArray[np.float32], scale: NDArray[Any], scheme: Scheme) -> NDArray[np.float32]:
    """Return a bias that has at most the largest integer at this scale."""
    # The type's own limit saturates the integers of a bias in 32 bits, and float32 cannot represent that limit.
    if scheme.bias_bits >= WIDEST_BIAS:
        return bias
    limit = largest_bias(scheme) * scale.astype(np.float64)
    return np.clip(bias, -limit, limit).astype(np.float32)
