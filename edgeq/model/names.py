"""Names for nodes: every one has one, and no two have the same, so that nodes can be spoken of."""

from __future__ import annotations

import onnx

from edgeq.model.tensors import iter_graphs


def name_nodes(model: onnx.ModelProto) -> int:
    """Give each unnamed node, and each but the first of those that share a name, a new unique name, in place.

    A new name is the old one (or the operator type) and a number; it depends on the graph alone. Nodes of subgraphs
    share the one space of names.

    Returns:
        How many nodes were named.
    """
    nodes = [node for graph in iter_graphs(model.graph) for node in graph.node]
    taken = {n.name for n in nodes}
    seen: set[str] = {""}
    changed = 0
    for index, node in enumerate(nodes):
        if node.name in seen:
            node.name = _free(node.name or node.op_type, index, taken)
            taken.add(node.name)
            changed += 1
        seen.add(node.name)
    return changed


def _free(stem: str, index: int, taken: set[str]) -> str:
    name = f"{stem}_{index}"
    while name in taken:
        name += "_"
    return name
