"""Compute sums, roundings and saturation as the array does, bit by bit.

The functions model int8 operands, int32 accumulators that wrap, and the float32 multiplier, whose product is rounded
once. The rounding is half to even or, on request, that of the header's macro. They also model saturation, relu, and max
pooling of the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Int8s, Pair

# float32 holds every whole number up to here, so sums below it are exact in any order.
_FLOAT32_EXACT = 2**24

# The largest magnitude of an int8.
_LARGEST_INPUT = 128

PARTIAL_BITS = 20
"""Bits of a partial sum that leaves an output-stationary array."""


def exact_type(weights: Int8s) -> type[np.floating[Any]]:
    """Return the narrowest float type that represents every partial sum of int8 inputs times `weights` [O, ...]
    exactly.
    """
    sums = np.abs(weights.reshape(len(weights), -1).astype(np.int64)).sum(axis=1)
    return np.float32 if int(sums.max(initial=0)) * _LARGEST_INPUT < _FLOAT32_EXACT else np.float64


def convolve(
    x: Int8s, weights: Int8s, groups: int, strides: Pair, dilations: Pair, pads: steps.Pads, *, k_tile: int = 0
) -> NDArray[Any]:
    """Return the exact sums Σ a·w of a convolution, as a float array [N, O, rows, columns].

    Args:
        x: int8 [N, I, H, W].
        weights: int8 [O, I / groups, kh, kw].
        k_tile: number of products after which a partial sum is cut to 20 bits; 0 means no cutting. Products are added
            in the order kh, kw, channel.
    """
    # BLAS multiplies floats much faster than NumPy multiplies integers, and the sums are exact in the chosen type.
    kind = exact_type(weights)
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(kind)
    outputs, depth, kh, kw = weights.shape
    rows, columns = (
        (size - (k - 1) * dilation - 1) // stride + 1
        for size, k, stride, dilation in zip(padded.shape[2:], (kh, kw), strides, dilations, strict=True)
    )
    spans = _spans((kh, kw), strides, dilations, (rows, columns))
    # A depthwise layer would be one tiny product for each channel.
    if depth == 1 and groups == outputs == x.shape[1] and not k_tile:
        total = np.zeros((len(x), outputs, rows, columns), kind)
        for i, j, vertical, horizontal in spans:
            total += padded[:, :, vertical, horizontal] * weights[:, 0, i, j].astype(kind)[:, None, None]
        return total
    # Multiply once for all samples. With one product for each sample, BLAS would start its threads each time.
    channels_first = padded.transpose(1, 0, 2, 3)
    patches = np.empty((kh * kw, x.shape[1], len(x), rows, columns), kind)
    for tap, (_, _, vertical, horizontal) in enumerate(spans):
        patches[tap] = channels_first[:, :, vertical, horizontal]
    share = outputs // groups
    sums = np.empty((outputs, len(x), rows, columns), kind)
    for group in range(groups):
        group_patches = patches[:, group * depth : (group + 1) * depth]
        taps = weights[group * share : (group + 1) * share].transpose(0, 2, 3, 1).reshape(share, -1).astype(kind)
        product = multiply(taps, group_patches.reshape(kh * kw * depth, -1), k_tile)
        sums[group * share : (group + 1) * share] = product.reshape(share, len(x), rows, columns)
    return sums.transpose(1, 0, 2, 3)


def multiply(lhs: NDArray[Any], rhs: NDArray[Any], k_tile: int = 0) -> NDArray[Any]:
    """Return left [M, K] @ right [..., K, P]. With `k_tile`, cut each partial sum of `k_tile` products to 20 bits."""
    if not k_tile:
        return np.asarray(lhs @ rhs)
    limit = 2 ** (PARTIAL_BITS - 1) - 1
    parts = (
        np.clip(lhs[:, start : start + k_tile] @ rhs[..., start : start + k_tile, :], -limit - 1, limit)
        for start in range(0, lhs.shape[1], k_tile)
    )
    return np.asarray(sum(parts))


def wrapped(sums: NDArray[Any], bias: steps.Int32s) -> tuple[steps.Int32s, int]:
    """Add the bias to exact sums, and wrap the results like the int32 accumulator. The bias broadcasts.

    Returns:
        The accumulators, and the number of accumulators that wrapped.
    """
    if sums.dtype == np.float32:
        # float32 sums are below 2^24 in magnitude, so only a large bias can push the result out of the int32 range.
        largest = int(np.abs(bias.astype(np.int64)).max(initial=0)) + _FLOAT32_EXACT
        if largest < 2**31:
            accumulator = sums.astype(np.int32)
            accumulator += bias
            return accumulator, 0
    # int64 shows what int32 loses: the two differ exactly where the accumulator wrapped.
    wide = sums.astype(np.int64) + bias
    accumulator = wide.astype(np.int32)
    return accumulator, int(np.count_nonzero(accumulator != wide))


def largest_in_windows(
    x: Int8s, kernel: Pair, strides: Pair, dilations: Pair, pads: steps.Pads, size: Sequence[int], *, fill: int = -128
) -> Int8s:
    """Return the max pooling of `x`.

    Args:
        size: rows and columns of the output.
        fill: the value of the padding.
    """
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=fill)
    best: Int8s | None = None
    for _, _, vertical, horizontal in _spans(kernel, strides, dilations, (size[0], size[1])):
        window = padded[:, :, vertical, horizontal]
        best = window.copy() if best is None else np.maximum(best, window, out=best)
    assert best is not None
    return best


def sum_windows(x: Int8s, kernel: Pair, strides: Pair, pads: steps.Pads, size: Sequence[int]) -> steps.Int32s:
    """Return the sums over windows of the zero-padded input."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(np.int32)
    if kernel == padded.shape[2:]:
        return np.asarray(padded.sum(axis=(2, 3), keepdims=True, dtype=np.int32), np.int32)
    total = np.zeros((*x.shape[:2], *size), np.int32)
    for _, _, vertical, horizontal in _spans(kernel, strides, (1, 1), (size[0], size[1])):
        total += padded[:, :, vertical, horizontal]
    return total


def _spans(kernel: Pair, strides: Pair, dilations: Pair, size: Pair) -> list[tuple[int, int, slice, slice]]:
    """Return (row tap, column tap, the rows that it reads, the columns that it reads) for every tap of the kernel."""

    def span(tap: int, axis: int) -> slice:
        """Return the input positions that one kernel tap reads along one axis (0: rows, 1: columns)."""
        start = tap * dilations[axis]
        return slice(start, start + (size[axis] - 1) * strides[axis] + 1, strides[axis])

    return [(i, j, span(i, 0), span(j, 1)) for i in range(kernel[0]) for j in range(kernel[1])]


Rounding = Literal["even", "header"]
"""How products with a float32 scale become integers.

- "even": round half to even, as the hardware and ONNX Runtime do.
- "header": the macro of gemmini.h, which the CPU mode and the instruction-set simulator use. It truncates v ± 1 in
  float32. That differs from "even" only for the float32 values just below a power of two.
"""

# Rounding to 2^7 or above is beyond the range of int8.
_POWERS = 7


def rescale(accumulator: NDArray[np.int32], multiplier: Any, *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """Return f32(f32(accumulator) · multiplier), rounded by `rounding` and not saturated.

    Args:
        multiplier: float32; it broadcasts.
    """
    product: NDArray[np.float32] = accumulator.astype(np.float32)
    np.multiply(product, multiplier, out=product)
    return round_values(product, rounding=rounding)


def round_values(values: NDArray[np.float32], *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """Return `values` rounded by `rounding`. The function may overwrite `values`."""
    if rounding == "even":
        np.rint(values, out=values)
        return values
    rounded: NDArray[np.float32] = values.copy()
    np.rint(values, out=rounded)
    # For v just below 2^k, v + 1 rounds to 2^k + 1, and negative values mirror this. From 2^7 on, both ways of rounding
    # saturate.
    for power in range(_POWERS):
        below = np.nextafter(np.float32(2**power), np.float32(0))
        for sign in (1, -1):
            rounded[values == sign * below] = sign * (2**power + 1)
    return np.asarray(rounded, np.float32)


def shift_right(accumulator: NDArray[np.int32], shifts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return accumulators divided by 2^shifts and rounded half to even, with integer arithmetic.

    Args:
        shifts: numbers of bits, which broadcast; negative shifts multiply.
    """
    wide = accumulator.astype(np.int64) << np.maximum(-shifts, 0)
    down = np.broadcast_to(np.maximum(shifts, 0), wide.shape)
    floor = wide >> down
    remaining = wide - (floor << down)
    # A shift by 0 bits has no half, so nothing is rounded.
    half = np.where(down > 0, np.int64(1) << np.maximum(down - 1, 0), np.int64(1))
    up = (remaining > half) | ((remaining == half) & (floor & 1 == 1))
    return np.asarray(floor + (up & (down > 0)), np.float32)


def saturate(values: NDArray[np.float32], *, relu: bool = False) -> NDArray[np.int8]:
    """Return sat8 of the values. With `relu`, negative values also become 0."""
    np.clip(values, 0 if relu else -128, 127, out=values)
    return values.astype(np.int8)
