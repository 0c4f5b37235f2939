"""Group the nodes of a float model into units that go to float together."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgeq.model.graph import name_of
from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.layers import find_layers


@dataclass(frozen=True)
class Unit:
    """Describe nodes of the float model that go to float together.

    Attributes:
        name: name of the layer in the unit or, if there is none, of the first node.
        nodes: names of the nodes.
        tensors: tensors that the nodes compute, in order.
        reads: tensors from other nodes, and graph inputs, that the nodes read; constants are left out.
    """

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    reads: tuple[str, ...]


def find_units(model: ir.Model) -> tuple[Unit, ...]:
    """Return all nodes of the main graph, grouped into units, in the order of their first nodes."""
    followers = Followers(model)
    unit_of: dict[str | None, str] = {}
    for layer in find_layers(model):
        unit_of[layer.name] = layer.name
        for node in followers.find(layer.output).nodes:
            # Kernels fuse a layer with what follows element by element. A node after two layers goes with the first.
            unit_of.setdefault(node.name, layer.name)
    members: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        members.setdefault(unit_of.get(node.name, node.name or ""), []).append(node)
    return tuple(_build_unit(name, nodes) for name, nodes in members.items())


def _build_unit(name: str, nodes: list[ir.Node]) -> Unit:
    tensors = [name_of(value) for node in nodes for value in node.outputs if value.name]
    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    # Constants are never converted at run time, so they are no border between units.
    reads = [name_of(value) for value in inputs if not value.is_initializer() and name_of(value) not in tensors]
    return Unit(name, tuple(node.name or "" for node in nodes), tuple(tensors), tuple(reads))
