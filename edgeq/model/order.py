"""Sort the nodes of a protobuf graph, so that each comes after the nodes that it reads from."""

from __future__ import annotations

import heapq
from pathlib import Path

import onnx

from edgeq.errors import ModelError


def is_sorted(graph: onnx.GraphProto) -> bool:
    """Return whether the nodes are in topological order. A node must come after all nodes whose outputs are read by the
    node itself or by a graph inside it.
    """
    outputs = {o for node in graph.node for o in node.output if o}
    computed: set[str] = set()
    for node in graph.node:
        if any(name in outputs and name not in computed for name in names_read(node)):
            return False
        computed.update(node.output)
    return True


def sort_nodes(graph: onnx.GraphProto, path: Path) -> None:
    """Put the nodes of `graph` in topological order, in place, as close to the given order as possible.

    Raises:
        ModelError: nodes depend on each other in a cycle.
    """
    # Nearly every file is sorted, and its order is kept as it is.
    if is_sorted(graph):
        return
    maker = {o: i for i, node in enumerate(graph.node) for o in node.output if o}
    waiting = [{maker[n] for n in names_read(node) if n in maker} for node in graph.node]
    users: dict[int, list[int]] = {}
    for index, makers in enumerate(waiting):
        for m in makers:
            users.setdefault(m, []).append(index)
    ready = [i for i, makers in enumerate(waiting) if not makers]
    # The heap yields the node that came first in the file, so that the order changes as little as possible.
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for user in users.get(index, ()):
            waiting[user].discard(index)
            if not waiting[user]:
                heapq.heappush(ready, user)
    if len(order) < len(graph.node):
        stuck = graph.node[_on_cycle(waiting)]
        raise ModelError(
            f"{path}: node {stuck.name or stuck.op_type!r} depends on its own output, directly or through others",
            "The graph has a cycle and cannot run; export it again",
        )
    # Nodes are copied out first, because clearing the list frees them.
    ordered = onnx.GraphProto()
    ordered.node.extend(graph.node[i] for i in order)
    del graph.node[:]
    graph.node.extend(ordered.node)


def _on_cycle(waiting: list[set[int]]) -> int:
    """Return the index of a node on a cycle. Each waiting node waits for another waiting node, so following them must
    reach one of them twice.
    """
    index = next(i for i, makers in enumerate(waiting) if makers)
    visited: set[int] = set()
    while index not in visited:
        visited.add(index)
        index = min(waiting[index])
    return index


def names_read(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node reads: its inputs, and the names from outside that graphs inside it read."""
    names = {n for n in node.input if n}
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs):
            inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
            inside |= {o for n in graph.node for o in n.output}
            for inner in graph.node:
                names |= names_read(inner) - inside
            names |= {o.name for o in graph.output} - inside
    return names
