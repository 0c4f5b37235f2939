"""Compute Conv and Gemm in integers, as the runtime does.

    result = saturate(round((bias + Σ q w) / 2^s)),  s = exponent of the output - those of the input and the weights

The SIMD accumulators of the ESP32-S3 have 20 bits and saturate after each addition: first the bias, then the products
in the order of the filter (H, W, C). Channels that do not fill a block of 16 use one accumulator of 40 bits instead;
depthwise convolutions always use the 20 bits. Source: espressif/esp-dl 3.3.9, isa/tie728.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.layout import block_size
from edgeq.backends.espdl.network import DEPTHWISE, RELU, EspNode, EspTensor
from edgeq.backends.espdl.rounding import INTEGERS, ChipArithmetic, saturate

# Sums below 2^53 are exact in float64, whose matrix products are much faster than those of integers.
_EXACT = np.float64
_LANE_TYPE = "int8"


def run_conv(node: EspNode, data: NDArray[Any], arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Return the result of a Conv on [1, H, W, C]."""
    weights = node.data[1]
    # [places, taps, C]: the values under the filter at each place of the output.
    patches = _patches(node, data, weights.shape[:2])
    return _finish(node, _sums(node, patches, arithmetic), arithmetic)


def run_gemm(node: EspNode, data: NDArray[Any], arithmetic: ChipArithmetic) -> NDArray[Any]:
    """Return the result of a Gemm on [..., C]."""
    patches = data.reshape(-1, 1, data.shape[-1])
    return _finish(node, _sums(node, patches, arithmetic), arithmetic)


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


def _patches(node: EspNode, data: NDArray[Any], taps: tuple[int, ...]) -> NDArray[Any]:
    pads, strides, dilations = map(node.integers, ("pads", "strides", "dilations"))
    padded = np.pad(data[0], ((pads[0], pads[2]), (pads[1], pads[3]), (0, 0)))
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(taps, dilations, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(0, 1))
    windows = windows[:: strides[0], :: strides[1], :, :: dilations[0], :: dilations[1]]
    # [H, W, C, taps, taps] → [H W, taps taps, C]
    places = windows.shape[0] * windows.shape[1]
    return windows.transpose(0, 1, 3, 4, 2).reshape(places, taps[0] * taps[1], data.shape[3])


def _bias(node: EspNode) -> NDArray[np.int64]:
    if len(node.data) < 3:
        return np.zeros(1, INTEGERS)
    values = node.data[2].values
    assert values is not None
    return values.astype(INTEGERS)


def _sums(node: EspNode, patches: NDArray[Any], arithmetic: ChipArithmetic) -> NDArray[np.int64]:
    """Return the accumulators [places, output channels]."""
    weights, bias = node.data[1], _bias(node)
    assert weights.values is not None
    depthwise = weights.layout == DEPTHWISE
    exact = patches.astype(_EXACT)
    if depthwise:
        filters = weights.values.reshape(-1, patches.shape[2]).astype(_EXACT)  # [taps, C]
        sums = np.einsum("ptc,tc->pc", exact, filters)
    else:
        filters = weights.values.reshape(-1, weights.shape[-1]).astype(_EXACT)  # [taps C, N]
        sums = exact.reshape(len(patches), -1) @ filters
    totals = sums.astype(INTEGERS) + bias
    if arithmetic.lane_bits >= 32 or weights.type != _LANE_TYPE:
        return np.asarray(totals, INTEGERS)
    return _in_lanes(totals, exact, filters, bias, weights, arithmetic.lane_bits)


def _in_lanes(
    totals: NDArray[np.int64],
    patches: NDArray[np.float64],
    filters: NDArray[np.float64],
    bias: NDArray[np.int64],
    weights: EspTensor,
    bits: int,
) -> NDArray[np.int64]:
    """Return the sums with those that leave the range of a lane replaced by what the lane gives."""
    high = 2 ** (bits - 1) - 1
    depthwise = weights.layout == DEPTHWISE
    # Only sums whose magnitudes could leave the lane are added one by one, because that is slow.
    if depthwise:
        reach = np.einsum("ptc,tc->pc", np.abs(patches), np.abs(filters))
        lanes = totals.shape[1]
    else:
        reach = np.abs(patches).reshape(len(patches), -1) @ np.abs(filters)
        lanes = totals.shape[1] // block_size(weights) * block_size(weights)
    outside = np.argwhere((reach + np.abs(bias))[:, :lanes] > high)
    if not len(outside):
        return totals
    bias, result = np.broadcast_to(bias, totals.shape[1:]), totals.copy()
    places, channels = outside.T
    if depthwise:
        products = patches[places, :, channels] * filters[:, channels].T
    else:
        products = patches.reshape(len(patches), -1)[places] * filters[:, channels].T
    lane = bias[channels].clip(-high - 1, high).astype(_EXACT)
    for step in products.T:
        lane = (lane + step).clip(-high - 1, high)
    result[places, channels] = lane.astype(INTEGERS)
    return result


def _finish(node: EspNode, sums: NDArray[np.int64], arithmetic: ChipArithmetic) -> NDArray[Any]:
    output = node.outputs[0]
    result = saturate(arithmetic.shift(sums, shifts(node)), output.type)
    if node.attributes["activation"] == RELU:
        result = np.maximum(result, 0)
    return result.reshape(output.shape)
