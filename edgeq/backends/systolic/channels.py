"""Which channels can be reordered together: the ties between the channel axes of tensors.

A convolution or product with all its inputs absorbs an order of its input channels in its weights; depthwise layers,
sums, pooling and clamps keep it. Where the order is visible outside (inputs and outputs of the model, float parts, data
movement and concatenation of channels), it is not changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    Layer,
    MoveLayer,
    Network,
    integer_tensors,
    layer_inputs,
    layer_outputs,
)
from edgeq.backends.systolic.program import Concat, MaxPool


@dataclass(frozen=True)
class ChannelGroup:
    """Tensors whose channels (axis 1) correspond.

    Attributes:
        tensors: in the order of the network.
        writers: layers with weights of their own for each of these channels: dense ones that make them, depthwise ones.
        readers: dense layers that read them, with the weights' inputs for each channel (more than one where rows and
            columns were flattened).
        fixed: why the order cannot change; "" where it can.
    """

    tensors: tuple[str, ...]
    writers: tuple[ConvLayer | FcLayer, ...]
    readers: tuple[tuple[ConvLayer | FcLayer, int], ...]
    fixed: str


def channel_groups(network: Network) -> tuple[ChannelGroup, ...]:
    """All groups, in the order of the network."""
    ties = _Ties(network)
    for layer in network.layers:
        ties.add(layer)
    return ties.groups()


class _Ties:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._tensors = [name for name in network.shapes if name in integer_tensors(network)]
        self._parent = {name: name for name in self._tensors}
        self._fixed: dict[str, str] = {}
        self._flat: dict[str, tuple[str, int]] = {}
        self._readers: list[tuple[str, ConvLayer | FcLayer, int]] = []
        self._writers: list[tuple[str, ConvLayer | FcLayer]] = []
        for name in (*network.inputs, *network.outputs):
            self._fix(name, "it is an input or output of the model")

    def add(self, layer: Layer) -> None:
        """Record which channel axes a layer ties together, and which it fixes."""
        if isinstance(layer, ConvLayer):
            self._add_conv(layer)
        elif isinstance(layer, FcLayer):
            self._add_fc(layer)
        elif isinstance(layer, AddLayer | MaxPool | AverageLayer | ClampLayer):
            for name in layer_inputs(layer):
                self._tie(name, layer.output)
        elif isinstance(layer, Concat):
            for name in (*layer.inputs, layer.output):
                if layer.axis == 1:
                    self._fix(name, f"{layer.name} concatenates its channels with others")
                else:
                    self._tie(name, layer.output)
        elif isinstance(layer, MoveLayer):
            self._add_move(layer)
        else:
            for name in (*layer_inputs(layer), *layer_outputs(layer)):
                self._fix(name, "a part in float reads or makes it")

    def groups(self) -> tuple[ChannelGroup, ...]:
        """The groups that all layers so far leave, each with its layers."""
        members: dict[str, list[str]] = {}
        for name in self._tensors:
            members.setdefault(self._root(name), []).append(name)
        readers: dict[str, list[tuple[ConvLayer | FcLayer, int]]] = {}
        for name, layer, repeat in self._readers:
            readers.setdefault(self._root(name), []).append((layer, repeat))
        writers: dict[str, list[ConvLayer | FcLayer]] = {}
        for name, layer in self._writers:
            writers.setdefault(self._root(name), []).append(layer)
        fixed: dict[str, str] = {}
        for name, reason in self._fixed.items():
            if name in self._parent:
                fixed.setdefault(self._root(name), reason)
        return tuple(
            ChannelGroup(tuple(names), tuple(writers.get(root, ())), tuple(readers.get(root, ())), fixed.get(root, ""))
            for root, names in members.items()
        )

    def _add_conv(self, layer: ConvLayer) -> None:
        self._writers.append((layer.output, layer))
        if layer.depthwise:
            self._tie(layer.input, layer.output)
        elif layer.groups == 1:
            self._readers.append((layer.input, layer, 1))
        else:
            for name in (layer.input, layer.output):
                self._fix(name, f"{layer.name} is a grouped convolution")

    def _add_fc(self, layer: FcLayer) -> None:
        self._writers.append((layer.output, layer))
        if len(self._network.shapes[layer.output]) != 2:
            self._fix(layer.output, f"{layer.name} outputs rows")
        source, repeat = self._flat.get(layer.input, (layer.input, 1))
        if len(self._network.shapes[layer.input]) != 2:
            self._fix(layer.input, f"{layer.name} reads rows")
        else:
            self._readers.append((source, layer, repeat))

    def _add_move(self, layer: MoveLayer) -> None:
        before, after = (self._network.shapes[name] for name in (layer.input, layer.output))
        if layer.index is None and len(before) > 1 and len(after) > 1 and before[1] == after[1]:
            self._tie(layer.input, layer.output)
        elif (
            layer.index is None
            and len(after) == 2
            and all(
                isinstance(reader, FcLayer) for reader in self._network.layers if layer.output in layer_inputs(reader)
            )
            and layer.output not in self._network.outputs
        ):
            self._flat[layer.output] = (layer.input, math.prod(before[2:]))
        else:
            for name in (layer.input, layer.output):
                self._fix(name, f"{layer.name} rearranges its channels")

    def _fix(self, name: str, reason: str) -> None:
        self._fixed.setdefault(name, reason)

    def _tie(self, left: str, right: str) -> None:
        self._parent[self._root(right)] = self._root(left)

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name
