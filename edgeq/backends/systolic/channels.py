"""Sort the channels of a network for tiles that share a scale.

The array works in tiles of DIM output channels. Each tile may have its own scale at no cost. In the model's own order
of channels, almost every tile has a channel with large weights. Sorting the channels by the range of their weights puts
channels with similar ranges into one tile. The weights of the next layer are permuted to match: a dense convolution or
product absorbs the new order in its weights, while depthwise layers, sums, pooling and clamps pass it on. Some tensors
keep their order because it is visible elsewhere: inputs and outputs of the model, and tensors of float parts, data
movement, and concatenation of channels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted, step_inputs, step_outputs

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class ChannelGroup:
    """Describe a group of tensors whose channels (axis 1) correspond.

    Attributes:
        tensors: names, in the order of the network.
        writers: layers that have weights for each of these channels: dense layers that compute them, and depthwise
            layers.
        readers: dense layers that read the channels, each with the number of its weight inputs that belong to one
            channel. The number is above 1 if rows and columns were flattened.
        fixed: the reason why the order cannot change; "" if it can.
    """

    tensors: tuple[str, ...]
    writers: tuple[Weighted, ...]
    readers: tuple[tuple[Weighted, int], ...]
    fixed: str


def channel_groups(network: Network) -> tuple[ChannelGroup, ...]:
    """Return all groups, in the order of the network."""
    ties = _Ties(network)
    for layer in network.layers:
        ties.add(layer)
    return ties.groups()


class _Ties:
    def __init__(self, network: Network) -> None:
        self._network = network
        integers = network.integers
        self._parent = {name: name for name in network.shapes if name in integers}
        self._fixed: dict[str, str] = {}
        self._flat: dict[str, tuple[str, int]] = {}
        self._readers: list[tuple[str, tuple[Weighted, int]]] = []
        self._writers: list[tuple[str, Weighted]] = []
        self._fix((*network.inputs, *network.outputs), "it is an input or output of the model")

    def add(self, layer: Layer) -> None:
        """Record for one layer which tensors must have their channels in the same order, and which must keep their
        order.
        """
        names = (*step_inputs(layer), *step_outputs(layer))
        match layer:
            case steps.Conv():
                self._writers.append((layer.output, layer))
                # A depthwise layer computes each channel from the one at the same place.
                if layer.depthwise:
                    self._tie(names)
                elif layer.groups == 1:
                    self._readers.append((layer.input, (layer, 1)))
                else:
                    # Channels could move within a group only.
                    self._fix(names, f"{layer.name} is a grouped convolution")
            case steps.Fc():
                self._add_fc(layer)
            # The joined tensor would need the orders of all its parts at once.
            case steps.Concat() if layer.axis == 1:
                self._fix(names, f"{layer.name} concatenates its channels with others")
            case steps.Rearrange():
                self._add_move(layer)
            case steps.Float():
                self._fix(names, "a float part reads or computes it")
            # Everything else works on each channel by itself.
            case _:
                self._tie(names)

    def groups(self) -> tuple[ChannelGroup, ...]:
        """Return the groups that result from all layers added so far."""
        writers, readers = self._by_root(self._writers), self._by_root(self._readers)
        fixed = self._by_root((name, why) for name, why in self._fixed.items() if name in self._parent)
        return tuple(
            ChannelGroup(tuple(names), tuple(writers[root]), tuple(readers[root]), next(iter(fixed[root]), ""))
            for root, names in self._by_root((name, name) for name in self._parent).items()
        )

    def _by_root(self, items: Iterable[tuple[str, _Item]]) -> dict[str, list[_Item]]:
        grouped: dict[str, list[_Item]] = defaultdict(list)
        for name, item in items:
            grouped[self._root(name)].append(item)
        return grouped

    def _add_fc(self, layer: steps.Fc) -> None:
        self._writers.append((layer.output, layer))
        # The channels of rows are on the last axis, and a group's order is that of axis 1.
        if len(self._network.shapes[layer.output]) != 2:
            self._fix([layer.output], f"{layer.name} outputs rows")
        if len(self._network.shapes[layer.input]) != 2:
            self._fix([layer.input], f"{layer.name} reads rows")
        else:
            source, repeat = self._flat.get(layer.input, (layer.input, 1))
            self._readers.append((source, (layer, repeat)))

    def _add_move(self, layer: steps.Rearrange) -> None:
        input_shape, output_shape = (self._network.shapes[name] for name in (layer.input, layer.output))
        following = [reader for reader in self._network.layers if layer.output in step_inputs(reader)]
        inside = layer.output not in self._network.outputs and all(isinstance(reader, steps.Fc) for reader in following)
        if layer.index is None and len(input_shape) > 1 and len(output_shape) > 1 and input_shape[1] == output_shape[1]:
            self._tie([layer.input, layer.output])
        elif layer.index is None and len(output_shape) == 2 and inside:
            # The product behind the reshape has one weight for each pixel of a channel, and these move together.
            self._flat[layer.output] = (layer.input, math.prod(input_shape[2:]))
        else:
            self._fix([layer.input, layer.output], f"{layer.name} rearranges its channels")

    def _fix(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            self._fixed.setdefault(name, reason)

    def _tie(self, names: Sequence[str]) -> None:
        for name in names[:-1]:
            self._parent[self._root(names[-1])] = self._root(name)

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name


Order = NDArray[np.int64]


def sort_channels(network: Network, dim: int) -> Network:
    """Return the network with its channels in the best order for tiles of `dim` channels."""
    channels: dict[str, tuple[int, ...]] = {}
    layers: dict[str, Any] = {layer.name: layer for layer in network.layers}
    for group in channel_groups(network):
        order = best_order(group, dim)
        if order is None:
            continue
        for name in group.tensors:
            channels[name] = tuple(order.tolist())
        for writer in group.writers:
            current = layers[writer.name]
            layers[writer.name] = replace(current, weights=current.weights[order], bias=current.bias[order])
        for reader, repeat in group.readers:
            current = layers[reader.name]
            inputs = (order[:, None] * repeat + np.arange(repeat)).ravel()
            layers[reader.name] = replace(current, weights=current.weights[:, inputs])
    return replace(network, layers=tuple(layers[layer.name] for layer in network.layers), channels=channels)


def best_order(group: ChannelGroup, dim: int) -> Order | None:
    """Return the order of the channels that wastes the fewest bits over all layers of the group; None if the present
    order is best.
    """
    # With one tile, every order has the same scale.
    if group.fixed or not group.writers or len(group.writers[0].weights) <= dim:
        return None
    ranges = [_log_ranges(layer) for layer in group.writers]
    # The best order for one layer may be bad for another that shares it, so each layer's and their sum's are compared.
    candidates = [np.argsort(-key, kind="stable") for key in (*ranges, np.sum(ranges, axis=0))]
    best = min(candidates, key=lambda order: _waste(group.writers, order, dim))
    identity = np.arange(len(best))
    return best if _waste(group.writers, best, dim) < _waste(group.writers, identity, dim) else None


def _log_ranges(layer: Weighted) -> NDArray[np.float64]:
    largest = np.abs(layer.weights.reshape(len(layer.weights), -1)).max(axis=1)
    # Channels whose weights are nearly zero have no bits to lose. Without a floor, their logarithms would decide the
    # order.
    floor = max(float(largest.max(initial=0.0)) * 2.0**-16, 1e-30)
    return np.asarray(np.log2(np.maximum(largest, floor)), np.float64)


def _waste(layers: Sequence[Weighted], order: Order, dim: int) -> float:
    """Return the number of bits, summed over all layers and channels, that are lost because channels share a scale."""
    total = 0.0
    for layer in layers:
        ranges = _log_ranges(layer)[order]
        total += float((np.log2(tile_maxima(2.0**ranges, dim)) - ranges).sum())
    return total


def tile_maxima(rows: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Return the largest magnitude in each tile of `dim` rows, repeated for each row of the tile: [O, ...] → [O]."""
    largest = np.abs(rows.reshape(len(rows), -1)).max(axis=1, initial=0.0)
    starts = np.arange(0, len(rows), dim)
    return np.asarray(np.repeat(np.maximum.reduceat(largest, starts), np.diff([*starts, len(rows)])), np.float64)
