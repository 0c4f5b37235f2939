"""Name nodes, and rename tensors whose names a quantizer may also give to tensors that it makes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from edgeq.model.graph import is_random, operator_of

# Suffixes that quantizers append to a tensor's name. They name its scale, its integers and the outputs of its Q/DQ
# pair.
_DERIVED_NAME = re.compile(r"_(?:(?:output_)?quantized|scale|zero_point|QuantizeLinear|DequantizeLinear)")


def name_nodes(model: ir.Model) -> int:
    """Give a new, unique name to each node that has no name or the name of an earlier node, in place.

    A new name is the old name (or the operator type) plus a number. A random operator without a name gets the name of
    its output (`edgeq.run.draws`). The names depend only on the graph. Nodes of bodies also get names that differ from
    those of all other nodes.

    Returns:
        The number of nodes that were renamed.
    """
    changed = 0
    for node, name in node_names(model).items():
        if node.name != name:
            node.name = name
            changed += 1
    return changed


def node_names(model: ir.Model) -> dict[ir.Node, str]:
    """Return each node with the name that `name_nodes` would give it. The nodes of the main graph come before those of
    bodies.
    """
    nodes = [node for graph in model.graphs() for node in graph]
    used_names = {node.name or "" for node in nodes}
    assigned_names = {""}
    names: dict[ir.Node, str] = {}
    for position, node in enumerate(nodes):
        name = node.name or ""
        if not name and is_random(node):
            # The numbers that measurements give to a nameless node depend on the name of its output.
            output = next((output.name for output in node.outputs if output.name), "")
            name = output if output not in used_names else ""
        if name in assigned_names:
            name = _find_free_name(name or node.op_type, position, used_names)
            used_names.add(name)
        assigned_names.add(name)
        names[node] = name
    return names


def clashing_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that a quantizer may also give to a new tensor. Each name is mapped to the name of the tensor
    from which the new tensor would be derived.
    """
    present_names = set(names)
    return {
        name: name[: match.start()]
        for name in sorted(present_names)
        for match in _DERIVED_NAME.finditer(name)
        if "/" not in name[match.end() :] and name[: match.start()] in present_names
    }


def separate_names(model: ir.Model) -> tuple[str, ...]:
    """Rename inner tensors, in place, if a quantizer would give their name to a tensor that it derives from another
    tensor. Inputs and outputs of the model keep their names: if one tensor of such a pair is an input or output, the
    other is renamed.

    Returns:
        The names that no longer exist.
    """
    signature_names = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    inner: dict[str, list[ir.Value]] = {}
    for graph in model.graphs():
        outputs = (output for node in graph for output in node.outputs)
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values(), *outputs)):
            if value.name:
                inner.setdefault(value.name, []).append(value)
    used_names, replaced_names = set(inner), []
    for name, origin in {**clashing_names(inner), **_names_of_copies(inner)}.items():
        old = next((candidate for candidate in (name, origin) if candidate not in signature_names), None)
        if old is None or old in replaced_names:
            continue
        new = f"{old}/1"
        while new in used_names:
            new += "_"
        used_names.add(new)
        replaced_names.append(old)
        for value in inner[old]:
            value.name = new
    return tuple(replaced_names)


def _names_of_copies(named: Mapping[str, Sequence[ir.Value]]) -> dict[str, str]:
    """Return tensor names that onnxruntime's quantizer may choose for copies of a bias, as name → name of the bias. The
    quantizer copies a bias that several layers share, and appends a number to its name. Names of initializers are left
    out.
    """
    shared_biases = {name for name, values in named.items() if sum(map(_layers_with_bias, values)) > 1}
    free = (name for name, values in named.items() if not any(value.is_initializer() for value in values))
    return {
        name: name[:end]
        for name in sorted(free)
        for end in range(len(name.rstrip("0123456789")), len(name))
        if name[:end] in shared_biases
    }


def _layers_with_bias(value: ir.Value) -> int:
    if not value.is_initializer():
        return 0
    return sum(place == operator_of(node).bias for node, place in value.uses())


def _find_free_name(stem: str, position: int, used_names: set[str]) -> str:
    name = f"{stem}_{position}"
    while name in used_names:
        name += "_"
    return name
