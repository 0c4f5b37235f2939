"""Integer convolutions and windows on NCHW arrays, exact: floating-point BLAS where no sum can leave its mantissa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.program import Int8s, Int32s, Pads, Pair

_FLOAT32_EXACT = 2**24
_LARGEST_INPUT = 128
PARTIAL_BITS = 20
"""Width of a partial sum that leaves an output-stationary array."""


def exact_type(weights: Int8s) -> type[np.floating[Any]]:
    """The narrowest floating-point type in which no partial sum of products with [O, ...] weights can round."""
    sums = np.abs(weights.reshape(len(weights), -1).astype(np.int64)).sum(axis=1)
    return np.float32 if int(sums.max(initial=0)) * _LARGEST_INPUT < _FLOAT32_EXACT else np.float64


def convolve(
    x: Int8s, weights: Int8s, groups: int, strides: Pair, dilations: Pair, pads: Pads, *, k_tile: int = 0
) -> NDArray[Any]:
    """Σ a·w of int8 [N, I, H, W] with int8 [O, I / groups, kh, kw]: [N, O, rows, columns], exact, as a float array.

    Args:
        k_tile: 0, or the depth (in order kh, kw, channel) after which partial sums are cut to 20 bits.
    """
    kind = exact_type(weights)
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(kind)
    outputs, depth, kh, kw = weights.shape
    rows, columns = (
        (size - (k - 1) * dilation - 1) // stride + 1
        for size, k, stride, dilation in zip(padded.shape[2:], (kh, kw), strides, dilations, strict=True)
    )
    spans = _spans((kh, kw), strides, dilations, (rows, columns))
    if depth == 1 and groups == outputs == x.shape[1] and not k_tile:
        total = np.zeros((len(x), outputs, rows, columns), kind)
        for i, j, vertical, horizontal in spans:
            total += padded[:, :, vertical, horizontal] * weights[:, 0, i, j].astype(kind)[:, None, None]
        return total
    # One product for all samples: BLAS would start its threads for each.
    channels_first = padded.transpose(1, 0, 2, 3)
    patches = np.empty((kh * kw, x.shape[1], len(x), rows, columns), kind)
    for tap, (_, _, vertical, horizontal) in enumerate(spans):
        patches[tap] = channels_first[:, :, vertical, horizontal]
    share = outputs // groups
    made = np.empty((outputs, len(x), rows, columns), kind)
    for group in range(groups):
        own = patches[:, group * depth : (group + 1) * depth]
        taps = weights[group * share : (group + 1) * share].transpose(0, 2, 3, 1).reshape(share, -1).astype(kind)
        product = multiply(taps, own.reshape(kh * kw * depth, -1), k_tile)
        made[group * share : (group + 1) * share] = product.reshape(share, len(x), rows, columns)
    return made.transpose(1, 0, 2, 3)


def multiply(left: NDArray[Any], right: NDArray[Any], k_tile: int = 0) -> NDArray[Any]:
    """left [M, K] @ right [..., K, P], with partial sums of `k_tile` products cut to 20 bits where that is not 0."""
    if not k_tile:
        return np.asarray(left @ right)
    limit = 2 ** (PARTIAL_BITS - 1) - 1
    parts = (
        np.clip(left[:, start : start + k_tile] @ right[..., start : start + k_tile, :], -limit - 1, limit)
        for start in range(0, left.shape[1], k_tile)
    )
    return np.asarray(sum(parts))


def wrapped(sums: NDArray[Any], bias: Int32s) -> tuple[Int32s, int]:
    """Exact sums plus bias (which broadcasts) as the int32 accumulator holds them, and how many of them wrapped."""
    if sums.dtype == np.float32:
        # Below 2^24 in magnitude: only a large bias can carry a sum out of int32.
        largest = int(np.abs(bias.astype(np.int64)).max(initial=0)) + _FLOAT32_EXACT
        if largest < 2**31:
            accumulator = sums.astype(np.int32)
            accumulator += bias
            return accumulator, 0
    wide = sums.astype(np.int64) + bias
    accumulator = wide.astype(np.int32)
    return accumulator, int(np.count_nonzero(accumulator != wide))


def largest_in_windows(
    x: Int8s, kernel: Pair, strides: Pair, dilations: Pair, pads: Pads, size: Sequence[int], *, fill: int = -128
) -> Int8s:
    """Max pooling to `size` (rows, columns); `fill` stands in the padding."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=fill)
    best: Int8s | None = None
    for _, _, vertical, horizontal in _spans(kernel, strides, dilations, (size[0], size[1])):
        window = padded[:, :, vertical, horizontal]
        best = window.copy() if best is None else np.maximum(best, window, out=best)
    assert best is not None
    return best


def sum_windows(x: Int8s, kernel: Pair, strides: Pair, pads: Pads, size: Sequence[int]) -> Int32s:
    """Sums over windows of the zero-padded input."""
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))).astype(np.int32)
    if kernel == padded.shape[2:]:
        return np.asarray(padded.sum(axis=(2, 3), keepdims=True, dtype=np.int32), np.int32)
    total = np.zeros((*x.shape[:2], *size), np.int32)
    for _, _, vertical, horizontal in _spans(kernel, strides, (1, 1), (size[0], size[1])):
        total += padded[:, :, vertical, horizontal]
    return total


def _spans(kernel: Pair, strides: Pair, dilations: Pair, size: Pair) -> list[tuple[int, int, slice, slice]]:
    """(row tap, column tap, the rows it reads, the columns it reads) of every tap."""

    def span(tap: int, axis: int) -> slice:
        """The input positions that one kernel tap reads along one axis (0: rows, 1: columns)."""
        start = tap * dilations[axis]
        return slice(start, start + (size[axis] - 1) * strides[axis] + 1, strides[axis])

    return [(i, j, span(i, 0), span(j, 1)) for i in range(kernel[0]) for j in range(kernel[1])]
