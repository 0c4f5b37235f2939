"""Unique node names: users, tables and reports identify nodes by them. Tensor names that quantizers leave alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from edgeq.graph.operators import operator_of

# What quantizers append to the name of a tensor for its scale, its integers and what Q/DQ pairs give.
_MADE = re.compile(r"_(?:(?:output_)?quantized|scale|zero_point|QuantizeLinear|DequantizeLinear)")


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


def clashing_names(names: Iterable[str]) -> dict[str, str]:
    """Names that quantizers give, or may give, to what they make for another of these tensors → that one's name."""
    known = set(names)
    return {
        name: name[: match.start()]
        for name in sorted(known)
        for match in _MADE.finditer(name)
        if "/" not in name[match.end() :] and name[: match.start()] in known
    }


def separate_names(model: ir.Model) -> tuple[str, ...]:
    """Rename inner tensors, in place, until none has a name that a quantizer would give to what it makes for another.
    Inputs and outputs of the model keep theirs: of a pair with one of them the other is renamed.

    Returns:
        The names that are gone.
    """
    kept = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    inner: dict[str, list[ir.Value]] = {}
    for graph in model.graphs():
        made = (output for node in graph for output in node.outputs)
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values(), *made)):
            if value.name:
                inner.setdefault(value.name, []).append(value)
    taken, gone = set(inner), []
    for name, other in {**clashing_names(inner), **_names_of_copies(inner)}.items():
        old = next((one for one in (name, other) if one not in kept), None)
        if old is None or old in gone:
            continue
        new = f"{old}/1"
        while new in taken:
            new += "_"
        taken.add(new)
        gone.append(old)
        for value in inner[old]:
            value.name = new
    return tuple(gone)


def _names_of_copies(named: Mapping[str, Sequence[ir.Value]]) -> dict[str, str]:
    """Names of what is no initializer that onnxruntime's quantizer may give to the copies of a bias of several layers,
    its name with a number → that bias's name."""
    shared = {name for name, values in named.items() if sum(map(_layers_with_bias, values)) > 1}
    free = (name for name, values in named.items() if not any(value.is_initializer() for value in values))
    return {
        name: name[:end]
        for name in sorted(free)
        for end in range(len(name.rstrip("0123456789")), len(name))
        if name[:end] in shared
    }


def _layers_with_bias(value: ir.Value) -> int:
    if not value.is_initializer():
        return 0
    return sum(place == operator_of(node).bias for node, place in value.uses())


def _free(stem: str, position: int, taken: set[str]) -> str:
    name = f"{stem}_{position}"
    while name in taken:
        name += "_"
    return name
