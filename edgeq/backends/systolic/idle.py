"""Weights that read nothing but zeros, set to zero.

A channel whose largest possible result lies below its relu is 0 whatever comes in. Batch normalization leaves such
channels with weights of any size behind them, which nothing reads: in a tile of channels with one scale, they would
take the bits of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    Layer,
    Network,
    layer_outputs,
)
from edgeq.backends.systolic.program import MaxPool

Channels = NDArray[np.bool_]
_LARGEST_INPUT = 128


def without_idle_weights(network: Network, scales: Mapping[str, float]) -> Network:
    """Return the network with the weights of channels that are always zero set to zero.

    Args:
        scales: of every integer tensor: they bound what a layer can read.
    """
    low: dict[str, Channels] = {}  # by tensor: channels that are never above zero
    idle: dict[str, Channels] = {}  # by tensor: channels that are always zero
    layers: list[Layer] = []
    for layer in network.layers:
        if isinstance(layer, ConvLayer | FcLayer):
            layer = _silenced(layer, idle.get(layer.input))
            most = np.abs(layer.weights.reshape(len(layer.bias), -1)).sum(axis=1) * _LARGEST_INPUT * scales[layer.input]
            low[layer.output] = most + layer.bias <= 0
            if layer.relu:
                idle[layer.output] = low[layer.output]
        elif isinstance(layer, ClampLayer) and layer.low == 0 and layer.input in low:
            idle[layer.output] = low[layer.input]
        elif isinstance(layer, ClampLayer | MaxPool | AverageLayer) and layer.input in idle:
            if not isinstance(layer, ClampLayer) or layer.low <= 0 <= layer.high:
                idle[layer.output] = idle[layer.input]
        elif isinstance(layer, AddLayer) and layer.left in idle and layer.right in idle:
            idle[layer_outputs(layer)[0]] = idle[layer.left] & idle[layer.right]
        layers.append(layer)
    return replace(network, layers=tuple(layers))


def _silenced(layer: ConvLayer | FcLayer, idle: Channels | None) -> ConvLayer | FcLayer:
    """Return `layer` without the weights that read `idle` channels; as it is where it has groups of several."""
    if idle is None or not idle.any():
        return layer
    weights = layer.weights.copy()
    if isinstance(layer, ConvLayer) and layer.depthwise:
        weights[idle] = 0.0
    elif isinstance(layer, FcLayer) or layer.groups == 1:
        weights[:, idle] = 0.0
    return replace(layer, weights=weights)
