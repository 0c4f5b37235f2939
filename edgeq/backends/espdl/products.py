"""Compute Conv and Gemm in integers, as the runtime does.

    result = saturate(round((bias + Σ q w) / 2^s)),  s = exponent of the output - those of the input and the weights

The SIMD accumulators of the ESP32-S3 have 20 bits and saturate after each addition: first the bias, then the products
in the order of the filter (H, W, C). Channels that do not fill a block of 16 use one accumulator of 40 bits instead;
depthwise convolutions always use the 20 bits. Source: espressif/esp-dl 3.3.9, isa/tie728.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.layout import block_size
from edgeq.backends.espdl.network import DEPTHWISE, RELU, EspNode
from edgeq.backends.espdl.rounding import INTEGERS, ChipArithmetic, saturate

# Matrix products of floats are much faster than those of integers. Sums below these limits are exact.
_EXACT = {np.float32: 2**24, np.float64: 2**53}
_LANE_TYPE = "int8"
# Bits of accumulators that never saturate.
_WHOLE = 32


def run_conv(node: EspNode, data: NDArray[Any], arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Return the result of a Conv on [1, H, W, C]."""
    sums = _sums(node, lambda values, weights: _convolve(node, values, weights), data)
    if _may_saturate(node, arithmetic):
        patches = _patches(node, data)
        sums = _in_lanes(node, sums, patches, arithmetic.lane_bits)
    return _finish(node, sums, arithmetic)


def run_gemm(node: EspNode, data: NDArray[Any], arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Return the result of a Gemm on [..., C]."""
    rows = data.reshape(-1, data.shape[-1])
    sums = _sums(node, lambda values, weights: values @ weights[0, 0], rows)
    if _may_saturate(node, arithmetic):
        sums = _in_lanes(node, sums, rows[:, None, :], arithmetic.lane_bits)
    return _finish(node, sums, arithmetic)


def shifts(node: EspNode) -> NDArray[np.int64]:
    """Return by how many bits the sums of a Conv or Gemm are shifted to the right: one number, or one for each output
    channel.
    """
    exponents = np.array(node.data[1].exponents, INTEGERS)
    return node.outputs[0].exponent - node.data[0].exponent - exponents


def largest_sum(node: EspNode) -> int:
    """Return a bound of the magnitude of all partial sums, whatever the input is."""
    data, weights = node.data[0], node.data[1]
    assert weights.values is not None
    magnitudes = np.abs(weights.values.astype(INTEGERS))
    axes = (0, 1, 3) if weights.layout == DEPTHWISE else (0, 1, 2)
    bound = np.iinfo(data.type).max + 1
    return int((magnitudes.sum(axis=axes) * bound + np.abs(_bias(node))).max())


def _convolve(node: EspNode, data: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of products [places, channels], one tap of the filter after the other."""
    depthwise, taps = node.data[1].layout == DEPTHWISE, weights.shape[:2]
    total: NDArray[Any] = np.zeros((), data.dtype)
    for place in np.ndindex(*taps):
        part = _under_tap(node, data, taps, place)
        total = total + (part * weights[place][:, 0] if depthwise else part @ weights[place])
    return np.asarray(total).reshape(-1, total.shape[-1])


def _under_tap(node: EspNode, data: NDArray[Any], taps: tuple[int, ...], place: tuple[int, ...]) -> NDArray[Any]:
    """Return the values [H, W, C] that a tap of the filter multiplies, one for each place of the output."""
    pads, strides, dilations = map(node.integers, ("pads", "strides", "dilations"))
    padded = np.pad(data[0], ((pads[0], pads[2]), (pads[1], pads[3]), (0, 0)))
    spans = []
    for axis in (0, 1):
        begin = place[axis] * dilations[axis]
        last = padded.shape[axis] - (taps[axis] - 1) * dilations[axis] + begin
        spans.append(slice(begin, last, strides[axis]))
    return padded[spans[0], spans[1]]


def _patches(node: EspNode, data: NDArray[Any]) -> NDArray[Any]:
    """Return [places, taps, channels]: the values under the filter at each place of the output."""
    taps = node.data[1].shape[:2]
    parts = [_under_tap(node, data, taps, place) for place in np.ndindex(*taps)]
    return np.stack(parts, axis=2).reshape(-1, len(parts), data.shape[3])


def _bias(node: EspNode) -> NDArray[np.int64]:
    if len(node.data) < 3:
        return np.zeros(1, INTEGERS)
    values = node.data[2].values
    assert values is not None
    return values.astype(INTEGERS)


def _sums(
    node: EspNode, multiply: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]], data: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the accumulators [places, output channels], as if they never saturated."""
    values = node.data[1].values
    assert values is not None
    bound = largest_sum(node)
    dtype = next((dtype for dtype, limit in _EXACT.items() if bound < limit), np.float64)
    products = multiply(data.astype(dtype), values.astype(dtype))
    return np.asarray(products.astype(INTEGERS) + _bias(node), INTEGERS)


def _may_saturate(node: EspNode, arithmetic: ChipArithmetic) -> bool:
    """Return whether some partial sum could leave a lane."""
    in_lanes = arithmetic.lane_bits < _WHOLE and node.data[1].type == _LANE_TYPE
    return in_lanes and largest_sum(node) > 2 ** (arithmetic.lane_bits - 1) - 1


def _in_lanes(node: EspNode, totals: NDArray[np.int64], patches: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """Return the sums with those that leave the range of a lane replaced by what the lane gives.

    Args:
        patches: [places, taps, channels].
    """
    weights, bias = node.data[1], np.broadcast_to(_bias(node), totals.shape[1:])
    assert weights.values is not None
    high, depthwise = 2 ** (bits - 1) - 1, weights.layout == DEPTHWISE
    values = patches.astype(np.float64)
    # Only sums whose magnitudes could leave the lane are added one by one, because that is slow.
    if depthwise:
        filters = weights.values.reshape(-1, patches.shape[2]).astype(np.float64)  # [taps, C]
        reach = (np.abs(values) * np.abs(filters)).sum(axis=1)
        lanes = totals.shape[1]
    else:
        values = values.reshape(len(patches), -1)
        filters = weights.values.reshape(-1, weights.shape[-1]).astype(np.float64)  # [taps C, N]
        reach = np.abs(values) @ np.abs(filters)
        lanes = totals.shape[1] // block_size(weights) * block_size(weights)
    places, channels = np.nonzero((reach + np.abs(bias))[:, :lanes] > high)
    if not len(places):
        return totals
    rows = values[places, :, channels] if depthwise else values[places]
    lane = bias[channels].clip(-high - 1, high).astype(np.float64)
    for step in (rows * filters[:, channels].T).T:
        lane = (lane + step).clip(-high - 1, high)
    result = totals.copy()
    result[places, channels] = lane.astype(INTEGERS)
    return result


def _finish(node: EspNode, sums: NDArray[np.int64], arithmetic: ChipArithmetic) -> NDArray[Any]:
    output = node.outputs[0]
    result = saturate(arithmetic.shift(sums, shifts(node)), output.type)
    if node.attributes["activation"] == RELU:
        result = np.maximum(result, 0)
    return result.reshape(output.shape)
