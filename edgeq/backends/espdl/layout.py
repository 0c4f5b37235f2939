"""Store convolution weights in the orders that the runtime's kernels read.

The C kernels read a filter as NHWC and a depthwise filter as HWCN. The SIMD kernels read blocks of 16 output channels
(8 with 16-bit weights), each as HWC and then the channels of the block. The channels that do not fill a block follow
without blocks: NHWC for a filter and CHWN for a depthwise one.
Source: esp-ppq 1.3.12, parser/espdl/export_patterns.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.network import DEPTHWISE, FILTER, EspTensor

_BLOCK_BYTES = 16
_PREFIX = "layout ==> "
UNKNOWN = f"{_PREFIX}UNK"
"""Text of a tensor that is stored in the order of its shape."""


def block_size(weights: EspTensor) -> int:
    """Return the number of output channels in a block."""
    return _BLOCK_BYTES // np.dtype(weights.type).itemsize


def describe_layout(weights: EspTensor, *, blocked: bool) -> str:
    """Return the text by which a file names the stored order of a tensor's values."""
    if not weights.layout:
        return UNKNOWN
    if not blocked:
        return f"{_PREFIX}{'HWCN' if weights.layout == DEPTHWISE else 'NHWC'}"
    size = block_size(weights)
    remainder = "_UNALIGNED" if _channels(weights.shape, weights.layout) % size else ""
    return f"{_PREFIX}(N/{size})HWC{size}{remainder}"


def store(weights: EspTensor, *, blocked: bool) -> NDArray[Any]:
    """Return the values of a constant in one dimension, in the order in which a file stores them."""
    assert weights.values is not None, weights.name
    if not weights.layout:
        return weights.values.ravel()
    channels_first = _channels_first(weights.values, weights.layout)
    if not blocked:
        return weights.values.ravel() if weights.layout == DEPTHWISE else channels_first.ravel()
    size, count = block_size(weights), len(channels_first)
    whole = count // size * size
    # [N / size, size, H, W, C] → [N / size, H, W, C, size]
    blocks = np.moveaxis(channels_first[:whole].reshape(-1, size, *channels_first.shape[1:]), 1, -1)
    remainder = channels_first[whole:]
    # A depthwise filter has C = 1, so its CHWN is the filter with its channels last.
    remainder = np.moveaxis(remainder, 0, -1) if weights.layout == DEPTHWISE else remainder
    return np.concatenate([blocks.ravel(), remainder.ravel()])


def restore(values: NDArray[Any], shape: tuple[int, ...], text: str, *, depthwise: bool) -> NDArray[Any]:
    """Return the values of a constant in the shape HWCN, from the order in which a file stores them. This undoes
    `store`.

    Args:
        values: one dimension.
        shape: the shape that the file states.
        text: what `describe_layout` returned.
        depthwise: whether the weights belong to a depthwise convolution.

    Raises:
        ValueError: the text names an unknown order.
    """
    order = text.removeprefix(_PREFIX)
    if order in ("UNK", "NCHW", "NCW", "") or (depthwise and order in ("HWCN", "WCN")):
        return values.reshape(shape)
    layout = DEPTHWISE if depthwise else FILTER
    channels, spatial = _channels(shape, layout), shape[:-2]
    inner = (*spatial, 1) if depthwise else (*spatial, shape[-2])
    if order in ("NHWC", "NWC") and not depthwise:
        return np.moveaxis(values.reshape(channels, *inner), 0, -1)
    size = {"(N/16)": 16, "(N/8)": 8}.get(order[: order.find(")") + 1])
    if size is None:
        raise ValueError(f"unknown layout {order!r}")
    whole = channels // size * size
    split = whole * int(np.prod(inner, dtype=np.int64))
    blocks = np.moveaxis(values[:split].reshape(-1, *inner, size), -1, 1).reshape(whole, *inner)
    remainder = values[split:]
    if depthwise:
        remainder = np.moveaxis(remainder.reshape(*inner, channels - whole), -1, 0)
    joined = np.concatenate([blocks, remainder.reshape(channels - whole, *inner)])
    return (
        joined[..., 0].transpose(*range(1, joined.ndim - 1), 0)[..., None] if depthwise else np.moveaxis(joined, 0, -1)
    )


def _channels(shape: tuple[int, ...], layout: str) -> int:
    return shape[-2] if layout == DEPTHWISE else shape[-1]


def _channels_first(values: NDArray[Any], layout: str) -> NDArray[Any]:
    """Return weights as [N, H, W, C]; C is 1 for a depthwise filter."""
    if layout == DEPTHWISE:  # [H, W, C, 1], where each channel C is an output channel
        return np.moveaxis(values, -2, 0)
    return np.moveaxis(values, -1, 0)
