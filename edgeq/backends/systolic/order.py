"""Output channels sorted by the range of their weights, so that the channels of one tile have like scales.

The array works in tiles of DIM output channels, and each tile may have a scale of its own at no cost. In the given
order, almost every tile holds a channel with large weights; sorted, channels of like range share a tile. The weights of
the next layer are permuted to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.channels import ChannelGroup, channel_groups
from edgeq.backends.systolic.network import ConvLayer, FcLayer, Network
from edgeq.backends.systolic.tiles import tile_maxima

Order = NDArray[np.int64]


def sort_channels(network: Network, dim: int) -> tuple[Network, dict[str, tuple[int, ...]]]:
    """The network with channels in the order that suits tiles of `dim`.

    Returns:
        The network, and by tensor the original channel at each place, where it changed.
    """
    channels: dict[str, tuple[int, ...]] = {}
    layers = {layer.name: layer for layer in network.layers}
    for group in channel_groups(network):
        order = best_order(group, dim)
        if order is None:
            continue
        for name in group.tensors:
            channels[name] = tuple(order.tolist())
        for writer in group.writers:
            own = layers[writer.name]
            assert isinstance(own, ConvLayer | FcLayer)
            layers[writer.name] = replace(own, weights=own.weights[order], bias=own.bias[order])
        for reader, repeat in group.readers:
            own = layers[reader.name]
            assert isinstance(own, ConvLayer | FcLayer)
            inputs = (order[:, None] * repeat + np.arange(repeat)).ravel()
            layers[reader.name] = replace(own, weights=own.weights[:, inputs])
    return replace(network, layers=tuple(layers[layer.name] for layer in network.layers)), channels


def best_order(group: ChannelGroup, dim: int) -> Order | None:
    """The order that wastes the fewest bits over all layers of the group; None where it is the given one."""
    if group.fixed or not group.writers or len(group.writers[0].weights) <= dim:
        return None
    ranges = [_log_ranges(layer) for layer in group.writers]
    candidates = [np.argsort(-key, kind="stable") for key in (*ranges, np.sum(ranges, axis=0))]
    best = min(candidates, key=lambda order: _waste(group.writers, order, dim))
    given = np.arange(len(best))
    return best if _waste(group.writers, best, dim) < _waste(group.writers, given, dim) else None


def _log_ranges(layer: ConvLayer | FcLayer) -> NDArray[np.float64]:
    largest = np.abs(layer.weights.reshape(len(layer.weights), -1)).max(axis=1)
    floor = max(float(largest.max(initial=0.0)) * 2.0**-16, 1e-30)
    return np.asarray(np.log2(np.maximum(largest, floor)), np.float64)


def _waste(layers: Sequence[ConvLayer | FcLayer], order: Order, dim: int) -> float:
    """Bits, summed over layers and channels, that a channel has less than with a scale of its own."""
    total = 0.0
    for layer in layers:
        ranges = _log_ranges(layer)[order]
        total += float((np.log2(tile_maxima(2.0**ranges, dim)) - ranges).sum())
    return total
