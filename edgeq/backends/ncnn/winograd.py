"""Bound the sums of int8 convolutions, because ncnn's Winograd method wraps large ones.

F(4,3) computes 576 times each sum in 32 bits, so the method is exact if no sum of products exceeds (2^31 - 1) / 576.
The largest sum of an output channel is 127 times the sum of the magnitudes of its weights.
"""

from __future__ import annotations

import numpy as np

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.network import NcnnNetwork, ParamLayer

_MOST = 127
# Keys of a convolution's parameters that must be 1 for the method: dilations and strides.
_UNIT_KEYS = (2, 12, 3, 13)


def largest_sum(layer: ParamLayer) -> int:
    """Return the largest magnitude that a sum of products of an int8 layer can have, over all channels."""
    weights = np.abs(layer.weights[0].astype(np.int64))
    return int(weights.reshape(weights.shape[0], -1).sum(axis=1).max()) * _MOST


def wrapping_layers(network: NcnnNetwork) -> tuple[ParamLayer, ...]:
    """Return the int8 convolutions whose sums may be too large for ncnn's Winograd method."""
    limit = dialect().winograd
    return tuple(
        layer
        for layer in network.layers
        if layer.scales is not None
        and layer.kind == "Convolution"
        and (layer.settings[1], layer.settings[11]) == (limit.kernel, limit.kernel)
        and all(layer.settings[key] == 1 for key in _UNIT_KEYS)
        and largest_sum(layer) > limit.largest_sum
    )
