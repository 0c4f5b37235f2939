"""Parts of the float model that a program carries along, in int8 and as nodes of another model."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgeq.graph.edit import Editor, drop_unused_initializers


def as_integers(part: ir.Model, source: str, target: str) -> ir.Model:
    """A clone of a part that moves float values from one tensor to another, on int8; it pads with 0.

    Args:
        source, target: names that its input and output get.
    """
    changed = part.clone()
    graph = changed.graph
    for node in graph:
        if node.op_type == "Pad":
            node.resize_inputs(min(len(node.inputs), 2))
    drop_unused_initializers(graph)
    for value, name in ((graph.inputs[0], source), (graph.outputs[0], target)):
        value.name, value.type = name, ir.TensorType(ir.DataType.INT8)
    return changed


def graft(editor: Editor, part: ir.Model, inputs: Mapping[str, ir.Value], prefix: str) -> dict[str, ir.Value]:
    """Move the nodes and constants of a part to the end of the graph of `editor`; the part is empty after that.

    Args:
        inputs: the part's inputs by name.
        prefix: put before the names of its constants.

    Returns:
        The part's outputs by name. They keep their names, as do the nodes and what is between them where the graph has
        no other of that name: a Split comes once for each of its outputs.
    """
    graph = part.graph
    for value in graph.inputs:
        value.replace_all_uses_with(inputs[value.name or ""])
    for value in graph.initializers.values():
        if value.uses() and value.const_value is not None:
            value.replace_all_uses_with(editor.constant(f"{prefix}/{value.name}", value.const_value))
    outputs = {value.name or "": value for value in graph.outputs}
    graph.outputs.clear()
    nodes = list(graph)
    for node in nodes:
        node.name = editor.free_node_name(node.name or "")
        for value in node.outputs:
            if value.name and value.name not in outputs:
                value.name = editor.free_value_name(value.name)
    graph.remove(nodes)
    editor.graph.extend(nodes)
    return outputs
