"""Parts of the float model that a program carries along, as nodes for another graph."""

from __future__ import annotations

import onnx
from onnx import TensorProto


def as_integers(part: onnx.ModelProto, source: str, target: str) -> onnx.ModelProto:
    """A part that only moves float values from `source` to `target`, in int8: its value to pad with too."""
    changed = onnx.ModelProto()
    changed.CopyFrom(part)
    graph = changed.graph
    for node in graph.node:
        if node.op_type == "Pad" and len(node.input) > 2:
            del node.input[2:]
    used = {name for node in graph.node for name in node.input}
    kept = [t for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    renamed = {graph.input[0].name: source, graph.output[0].name: target}
    for value in (*graph.input, *graph.output):
        value.name = renamed[value.name]
        value.type.tensor_type.elem_type = TensorProto.INT8
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    return changed


def grafted(part: onnx.ModelProto, prefix: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes and constants of a part; constants get names of their own."""
    graph = part.graph
    renamed = {t.name: f"{prefix}/{t.name}" for t in graph.initializer}
    nodes, constants = [], []
    for tensor in graph.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = renamed[tensor.name]
        constants.append(copy)
    for node in graph.node:
        fresh = onnx.NodeProto()
        fresh.CopyFrom(node)
        _rename(fresh, renamed)
        nodes.append(fresh)
    return nodes, constants


def _rename(node: onnx.NodeProto, renamed: dict[str, str]) -> None:
    for place, name in enumerate(node.input):
        node.input[place] = renamed.get(name, name)
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            inside = {t.name for t in graph.initializer} | {i.name for i in graph.input}
            inside |= {o for n in graph.node for o in n.output}
            outer = {name: new for name, new in renamed.items() if name not in inside}
            for inner in graph.node:
                _rename(inner, outer)
