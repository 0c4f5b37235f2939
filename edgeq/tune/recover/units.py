"""What is kept in float or in integers together: a layer with the element-wise nodes behind it, or one other node."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgeq.graph.query import name_of
from edgeq.tune.recover.elementwise import Followers
from edgeq.tune.recover.layers import find_layers


@dataclass(frozen=True)
class Unit:
    """Nodes of the float model that belong together.

    Attributes:
        name: of the first node, which is the layer if there is one.
        nodes: names.
        tensors: what the nodes compute, in order.
        reads: tensors that other nodes compute, and graph inputs; no constants.
    """

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    reads: tuple[str, ...]


def find_units(model: ir.Model) -> tuple[Unit, ...]:
    """All nodes of the main graph in units, in the order of their first nodes."""
    followers = Followers(model)
    unit_of: dict[str | None, str] = {}
    for layer in find_layers(model):
        unit_of[layer.name] = layer.name
        for node in followers.of(layer.output).nodes:
            unit_of.setdefault(node.name, layer.name)
    members: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        members.setdefault(unit_of.get(node.name, node.name or ""), []).append(node)
    return tuple(_unit(name, nodes) for name, nodes in members.items())


def _unit(name: str, nodes: list[ir.Node]) -> Unit:
    tensors = [name_of(value) for node in nodes for value in node.outputs if value.name]
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    reads = [name_of(value) for value in inputs if not value.is_initializer() and name_of(value) not in tensors]
    return Unit(name, tuple(node.name or "" for node in nodes), tuple(tensors), tuple(reads))
