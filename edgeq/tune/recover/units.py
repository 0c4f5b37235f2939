"""What is kept in float or in integers together: a layer with the element-wise nodes behind it, or one other node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from edgeq.tune.recover.elementwise import Followers
from edgeq.tune.recover.layers import find_layers


@dataclass(frozen=True)
class Unit:
    """Nodes of the float model that belong together.

    Attributes:
        name: of the first node, which is the layer if there is one.
        nodes: names.
        tensors: what the nodes make, in order.
        reads: tensors that come from outside, constants left out.
    """

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    reads: tuple[str, ...]


def find_units(model: onnx.ModelProto, types: Collection[str]) -> tuple[Unit, ...]:
    """Units of the main graph in its order, each with a node of one of `types`, the operators that are quantized."""
    followers = Followers(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    claimed: dict[str, str] = {}
    for layer in find_layers(model):
        claimed[layer.name] = layer.name
        for node in followers.of(layer.output).nodes:
            claimed.setdefault(node.name, layer.name)
    members: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        members.setdefault(claimed.get(node.name, node.name), []).append(node)
    found = []
    for name, nodes in members.items():
        if not any(node.op_type in types for node in nodes):
            continue
        made = tuple(tensor for node in nodes for tensor in node.output if tensor)
        read = dict.fromkeys(tensor for node in nodes for tensor in node.input if tensor)
        outside = tuple(tensor for tensor in read if tensor not in constants and tensor not in made)
        found.append(Unit(name, tuple(node.name for node in nodes), made, outside))
    return tuple(found)
