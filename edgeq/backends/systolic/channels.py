"""Prepare the channels of a network for tiles that share a scale, and choose the scales of its tensors.

The array works in tiles of DIM output channels. Each tile may have its own scale at no cost. In the model's own order
of channels, almost every tile has a channel with large weights. Sorting the channels by the range of their weights puts
channels with similar ranges into one tile. The weights of the next layer are permuted to match: a dense convolution or
product absorbs the new order in its weights, while depthwise layers, sums, pooling and clamps pass it on. Some tensors
keep their order because it is visible elsewhere: inputs and outputs of the model, and tensors of float parts, data
movement, and concatenation of channels.

Weights that read nothing but zeros are set to zero. If a channel has a relu and its largest possible result is not
positive, it is always 0. Batch normalization can make weights that read such channels arbitrarily large. These weights
have no effect, but in a tile with one scale, large weights would cost the other channels bits.

Tensors after a relu use all 256 integers, although zero points are 0. Values that are never negative would normally use
only half of the signed integers. Between layers with weights and without padding, the tensor can be stored minus a
constant:

    relu(x) is stored as x - 128 s, s = largest / 255    saturation at -128 does the work of the relu (or Clip from 0)
    the layer before adds -128 s to its bias; the layers that read the tensor add 128 Σ w: no extra operations

The steps are then half as large. In such a tensor, a zero of padding would mean 128 s, so tensors that a layer with
padding reads are not shifted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted, step_inputs, step_outputs
from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError

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
                if layer.depthwise:
                    self._tie(names)
                elif layer.groups == 1:
                    self._readers.append((layer.input, (layer, 1)))
                else:
                    self._fix(names, f"{layer.name} is a grouped convolution")
            case steps.Fc():
                self._add_fc(layer)
            case steps.Concat() if layer.axis == 1:
                self._fix(names, f"{layer.name} concatenates its channels with others")
            case steps.Rearrange():
                self._add_move(layer)
            case steps.Float():
                self._fix(names, "a float part reads or computes it")
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
        found: dict[str, list[_Item]] = defaultdict(list)
        for name, item in items:
            found[self._root(name)].append(item)
        return found

    def _add_fc(self, layer: steps.Fc) -> None:
        self._writers.append((layer.output, layer))
        if len(self._network.shapes[layer.output]) != 2:
            self._fix([layer.output], f"{layer.name} outputs rows")
        if len(self._network.shapes[layer.input]) != 2:
            self._fix([layer.input], f"{layer.name} reads rows")
        else:
            source, repeat = self._flat.get(layer.input, (layer.input, 1))
            self._readers.append((source, (layer, repeat)))

    def _add_move(self, layer: steps.Rearrange) -> None:
        before, after = (self._network.shapes[name] for name in (layer.input, layer.output))
        following = [reader for reader in self._network.layers if layer.output in step_inputs(reader)]
        inside = layer.output not in self._network.outputs and all(isinstance(reader, steps.Fc) for reader in following)
        if layer.index is None and len(before) > 1 and len(after) > 1 and before[1] == after[1]:
            self._tie([layer.input, layer.output])
        elif layer.index is None and len(after) == 2 and inside:
            self._flat[layer.output] = (layer.input, math.prod(before[2:]))
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
            most = np.abs(layer.weights.reshape(len(layer.bias), -1)).sum(axis=1) * _LARGEST_INPUT * scales[layer.input]
            low[layer.output] = most + layer.bias <= 0
            if layer.relu:
                idle[layer.output] = low[layer.output]
        elif isinstance(layer, steps.Clamp) and layer.low == 0 and layer.input in low:
            idle[layer.output] = low[layer.input]
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
    elif isinstance(layer, steps.Fc) or layer.groups == 1:
        weights[:, idle] = 0.0
    return replace(layer, weights=weights)


OFFSET = 128
_STEPS = 255
_SUFFIX = "/offset"


def with_offsets(
    network: Network, scales: Mapping[str, float], ranges: Mapping[str, Range], *, powers_of_two: bool
) -> tuple[Network, dict[str, float]]:
    """Subtract 128 steps from tensors after a relu before they are stored, if possible. The steps are then half as
    large. Return the network and its scales.

    Args:
        ranges: the ranges from which the scales were chosen. A tensor whose range must be kept is not shifted.
    """
    read = network.readers
    layers: dict[str, Any] = {layer.name: layer for layer in network.layers}
    shapes, dtypes, changed, shifted = dict(network.shapes), dict(network.dtypes), dict(scales), {}
    for layer in network.layers:
        clamp = _relu_behind(layer, network, read) if isinstance(layer, Weighted) else None
        if not isinstance(layer, Weighted) or clamp is None:
            continue
        origin = clamp.output
        step = scales[origin] * 127 / _STEPS
        step = 2.0 ** math.ceil(math.log2(step)) if powers_of_two else float(np.float32(step))
        # Saturation replaces the Clip only if the Clip's upper bound is not below the largest value that can be stored.
        cut = isinstance(clamp, steps.Clamp) and clamp.high < _STEPS * step * (1 - 1e-6)
        kept = origin in network.outputs or any(ranges[n].fixed_step for n in (layer.output, origin) if n in ranges)
        if kept or cut or not read.get(origin) or not all(map(_absorbs, read[origin])):
            continue
        name = f"{origin}{_SUFFIX}"
        sources = layer.sources if clamp is layer else (*layer.sources, *clamp.sources)
        bias = layers[layer.name].bias - OFFSET * step
        layers[layer.name] = replace(layers[layer.name], output=name, bias=bias, relu=False, sources=sources)
        if clamp is not layer:
            del layers[clamp.name]
        for reader in read[origin]:
            layers[reader.name] = replace(layers[reader.name], input=name)
        shapes[name], dtypes[name], changed[name], shifted[name] = shapes[origin], dtypes[origin], step, origin
    remaining = tuple(layers[layer.name] for layer in network.layers if layer.name in layers)
    return replace(network, layers=remaining, shapes=shapes, dtypes=dtypes, shifted=shifted), changed


def _relu_behind(layer: Weighted, network: Network, read: Mapping[str, list[Layer]]) -> Weighted | steps.Clamp | None:
    """Return the layer that applies the relu: `layer` itself, or a Clip from 0 that is its only reader; None if neither
    does.
    """
    if layer.relu:
        return layer
    behind = read.get(layer.output, [])
    alone = len(behind) == 1 and layer.output not in network.outputs
    return next((r for r in behind if alone and isinstance(r, steps.Clamp) and r.low == 0), None)


def _absorbs(layer: Layer) -> bool:
    """Return whether a layer can absorb an offset of its input in its bias."""
    return isinstance(layer, steps.Fc) or (isinstance(layer, steps.Conv) and not any(layer.pads))


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
            own = layers[writer.name]
            layers[writer.name] = replace(own, weights=own.weights[order], bias=own.bias[order])
        for reader, repeat in group.readers:
            own = layers[reader.name]
            inputs = (order[:, None] * repeat + np.arange(repeat)).ravel()
            layers[reader.name] = replace(own, weights=own.weights[:, inputs])
    return replace(network, layers=tuple(layers[layer.name] for layer in network.layers), channels=channels)


def best_order(group: ChannelGroup, dim: int) -> Order | None:
    """Return the order of the channels that wastes the fewest bits over all layers of the group; None if the present
    order is best.
    """
    if group.fixed or not group.writers or len(group.writers[0].weights) <= dim:
        return None
    ranges = [_log_ranges(layer) for layer in group.writers]
    candidates = [np.argsort(-key, kind="stable") for key in (*ranges, np.sum(ranges, axis=0))]
    best = min(candidates, key=lambda order: _waste(group.writers, order, dim))
    given = np.arange(len(best))
    return best if _waste(group.writers, best, dim) < _waste(group.writers, given, dim) else None


def _log_ranges(layer: Weighted) -> NDArray[np.float64]:
    largest = np.abs(layer.weights.reshape(len(layer.weights), -1)).max(axis=1)
    floor = max(float(largest.max(initial=0.0)) * 2.0**-16, 1e-30)
    return np.asarray(np.log2(np.maximum(largest, floor)), np.float64)


def _waste(layers: Sequence[Weighted], order: Order, dim: int) -> float:
    """Return the number of bits, summed over all layers and channels, that are lost because channels share a scale."""
    total = 0.0
    for layer in layers:
        ranges = _log_ranges(layer)[order]
        total += float((np.log2(tile_maxima(2.0**ranges, dim)) - ranges).sum())
    return total


_NOTHING = 1e-8


def activation_scales(network: Network, ranges: Mapping[str, Range], *, powers_of_two: bool) -> dict[str, float]:
    """Return the float32 scale of each tensor: its largest magnitude / 127, or 1 if all its values are zero.

    - Layers that pass integers on (pooling, clamps, concatenation, data movement) share one scale between inputs and
      outputs. The scale covers only the tensors that layers of other kinds read, so values that are clipped or pooled
      away do not widen the range.
    - The scale of a sum is at least that of both operands. Otherwise an operand would saturate before it is added. An
      operand that is all zero takes the scale of the sum.
    - On an array that shifts, all scales are powers of two, and so are their quotients.

    Raises:
        CalibrationError: a tensor has no range.
    """
    groups = _groups(network)
    used = _used(network)
    clamps = {layer.output: max(-layer.low, layer.high) for layer in network.layers if isinstance(layer, steps.Clamp)}
    scales: dict[str, float] = {}
    empty: set[str] = set()
    for members in {id(g): g for g in groups.values()}.values():
        known = [name for name in members if name in ranges]
        chosen = [name for name in known if name in used] or known
        if not chosen:
            raise CalibrationError(
                f"tensor {members[0]!r} has no calibrated range", "Calibrate this model again, with all its tensors"
            )
        bound = max(min(ranges[name].bound, clamps.get(name, math.inf)) for name in chosen)
        scale = float(np.float32(bound / steps.LARGEST))
        if bound <= _NOTHING:
            empty.update(members)
            scale = 1.0
        elif powers_of_two:
            scale = 2.0 ** math.ceil(math.log2(bound / steps.LARGEST))
        scales.update(dict.fromkeys(members, scale))
    additions = [layer for layer in network.layers if isinstance(layer, steps.ResidualAdd)]
    changed = True
    while changed:
        changed = False
        for layer in additions:
            least = max((scales[name] for name in (layer.left, layer.right) if name not in empty), default=0.0)
            if scales[layer.output] < least:
                scales.update(dict.fromkeys(groups[layer.output], least))
                empty.difference_update(groups[layer.output])
                changed = True
    # Start with the last sums: a sum that is all zero must have the scale of its reader before its operands get the
    # same scale.
    widest = dict.fromkeys(empty, math.inf)
    for layer in reversed(additions):
        for name in {layer.left, layer.right} & empty:
            widest[name] = min(widest[name], scales[layer.output])
            scales.update(dict.fromkeys(groups[name], widest[name]))
    return scales


def _groups(network: Network) -> dict[str, list[str]]:
    """Return, for each tensor, the list of all tensors that share its scale, itself included. All of them get the same
    list object.
    """
    groups: dict[str, list[str]] = {name: [name] for name in sorted(network.integers)}
    for layer in network.layers:
        if not isinstance(layer, steps.SAME_SCALE):
            continue
        first, *others = (*step_outputs(layer), *step_inputs(layer))
        for other in others:
            if groups[first] is not groups[other]:
                joined = groups[first] + groups[other]
                groups.update(dict.fromkeys(joined, joined))
    return groups


def _used(network: Network) -> set[str]:
    """Return the outputs, the tensors that nothing reads, and the tensors that a layer outside `SAME_SCALE` reads."""
    read = network.readers
    return {
        name
        for name in network.integers
        if name in network.outputs or not read[name] or any(not isinstance(r, steps.SAME_SCALE) for r in read[name])
    }


def tile_maxima(rows: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Return the largest magnitude in each tile of `dim` rows, repeated for each row of the tile: [O, ...] → [O]."""
    largest = np.abs(rows.reshape(len(rows), -1)).max(axis=1, initial=0.0)
    starts = np.arange(0, len(rows), dim)
    return np.asarray(np.repeat(np.maximum.reduceat(largest, starts), np.diff([*starts, len(rows)])), np.float64)
