"""Unique node names: users, tables and reports identify nodes by them."""

from __future__ import annotations

import onnx_ir as ir


def name_nodes(model: ir.Model) -> int:
    """Give each unnamed node, and each but the first of those that share a name, a new unique name, in place.

    A new name is the old one (or the operator type) and a number; it depends on the graph alone. Nodes of bodies share
    the one space of names.

    Returns:
        How many nodes were named.
    """
    changed = 0
    for node, name in node_names(model).items():
        if node.name != name:
            node.name = name
            changed += 1
    return changed


def node_names(model: ir.Model) -> dict[ir.Node, str]:
    """Every node, those of bodies after those of the main graph, and the name that `name_nodes` would give it."""
    nodes = [node for graph in model.graphs() for node in graph]
    taken = {node.name or "" for node in nodes}
    seen = {""}
    names: dict[ir.Node, str] = {}
    for position, node in enumerate(nodes):
        name = node.name or ""
        if name in seen:
            name = _free(name or node.op_type, position, taken)
            taken.add(name)
        seen.add(name)
        names[node] = name
    return names


def _free(stem: str, position: int, taken: set[str]) -> str:
    name = f"{stem}_{position}"
    while name in taken:
        name += "_"
    return name
