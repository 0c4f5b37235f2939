"""Which max pooling the array computes correctly when it is fused into a convolution."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.backends.systolic.network import ConvLayer, Layer
from edgeq.backends.systolic.program import MaxPool, Pool
from edgeq.backends.systolic.windows import Windows

# Window, stride and padding have two bits in the hardware's instruction, output sizes eight.
_FIELD = 3
_SIDE = 255


def direct(layer: ConvLayer, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the array's own convolution call computes a layer as it is: one group, no dilation, everything square.
    Other layers become im2col and a product, with the same results."""
    _, _, rows, columns = shapes[layer.input]
    _, _, out_rows, out_columns = shapes[layer.output]
    windows = Windows((layer.weights.shape[2], layer.weights.shape[3]), layer.strides, layer.dilations, layer.pads)
    return layer.groups == 1 and rows == columns and out_rows == out_columns and windows.regular


def fusable(layer: ConvLayer, following: Layer, shapes: Mapping[str, tuple[int, ...]]) -> Pool | None:
    """The fused form of a pooling behind a convolution that nothing else reads; None where it cannot be fused."""
    if not isinstance(following, MaxPool) or not direct(layer, shapes):
        return None
    kernel, strides, pads = following.kernel, following.strides, following.pads
    if not Windows(kernel, strides, following.dilations, pads).regular or max(kernel[0], strides[0], pads[0]) > _FIELD:
        return None
    if max(shapes[following.output][2:]) > _SIDE or max(shapes[layer.output][2:]) > _SIDE:
        return None
    # The array pads with 0, which a window of negative values would choose.
    if pads[0] and not layer.relu:
        return None
    return Pool(kernel[0], strides[0], pads[0])
