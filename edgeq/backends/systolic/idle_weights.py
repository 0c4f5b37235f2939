"""Set weights that read nothing but zeros to zero.

If a channel has a relu and its largest possible result is not positive, it is always 0. Batch normalization can make
weights that read such channels arbitrarily large. These weights have no effect, but in a tile with one scale, large
weights would cost the other channels bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted, step_outputs

Channels = NDArray[np.bool_]

_LARGEST_INPUT = 128


def without_idle_weights(network: Network, scales: Mapping[str, float]) -> Network:
    """Return the network with zeros in place of all weights that read a channel which is always zero.

    Args:
        scales: the scale of every integer tensor. The scales limit the values that a layer can read.
    """
    low: dict[str, Channels] = {}  # by tensor: channels that are never positive
    idle: dict[str, Channels] = {}  # by tensor: channels that are always zero
    layers: list[Layer] = []
    for layer in network.layers:
        if isinstance(layer, Weighted):
            layer = _silenced(layer, idle.get(layer.input))
            largest = (
                np.abs(layer.weights.reshape(len(layer.bias), -1)).sum(axis=1) * _LARGEST_INPUT * scales[layer.input]
            )
            # The largest result that int8 inputs allow. If it is not positive, no input can make the channel positive.
            low[layer.output] = largest + layer.bias <= 0
            if layer.relu:
                idle[layer.output] = low[layer.output]
        elif isinstance(layer, steps.Clamp) and layer.low == 0 and layer.input in low:
            idle[layer.output] = low[layer.input]
        # These layers keep zeros zero. A clamp does so only if zero is between its bounds.
        elif isinstance(layer, steps.Clamp | steps.MaxPool | steps.AveragePool) and layer.input in idle:
            if not isinstance(layer, steps.Clamp) or layer.low <= 0 <= layer.high:
                idle[layer.output] = idle[layer.input]
        elif isinstance(layer, steps.ResidualAdd) and layer.left in idle and layer.right in idle:
            idle[step_outputs(layer)[0]] = idle[layer.left] & idle[layer.right]
        layers.append(layer)
    return replace(network, layers=tuple(layers))


def _silenced(layer: Weighted, idle: Channels | None) -> Weighted:
    """Return `layer` with zeros in place of weights that read `idle` channels. Grouped convolutions stay unchanged."""
    if idle is None or not idle.any():
        return layer
    weights = layer.weights.copy()
    if isinstance(layer, steps.Conv) and layer.depthwise:
        weights[idle] = 0.0
    # In a grouped convolution, the index of an input channel depends on the group.
    elif isinstance(layer, steps.Fc) or layer.groups == 1:
        weights[:, idle] = 0.0
    return replace(layer, weights=weights)
