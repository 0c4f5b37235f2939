"""Removing what does nothing at inference: Identity, Dropout, a Cast to the same type, a Pad of nothing, what no output
depends on."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
)

from edgeq.graph.edit import drop_unused_initializers, replace_node
from edgeq.graph.query import bodies, constant, node_input


def tidy(model: ir.Model) -> int:
    """Make weights constants (not overridable inputs), Constant nodes initializers, and drop dead code, in place.

    Returns:
        How many nodes were dropped because no output depends on them.
    """
    RemoveInitializersFromInputsPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    dropped, last = 0, -1
    while dropped != last:  # what only a dead node in a branch used dies in the next round
        last = dropped
        dropped += sum(_drop_dead(graph) for graph in model.graphs())
    return dropped


def forget_origin(model: ir.Model) -> None:
    """Drop, in place, what exporters write about where nodes and the tensors between them came from: source lines,
    stack traces, module paths. No runtime reads it, it names files of the machine that exported, and PyTorch's takes
    more of a small int8 model than its weights. What describes the model, its inputs and its outputs stays."""
    for graph in model.graphs():
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                if not value.is_graph_output():
                    value.metadata_props.clear()
                    value.doc_string = None


def remove_no_ops(model: ir.Model) -> int:
    """Bypass Identity nodes, Dropout nodes that are not in training mode, and Casts and Pads that change nothing, in
    place.

    1. The output is no graph output: its users read the input instead.
    2. It is one, and the input is made by a node of the same graph and is no graph output: the input takes its name.
    3. Otherwise (a graph input or weight handed through, two outputs of one value) the node has to stay.

    Returns:
        How many were removed.
    """
    removed = 0
    for graph in model.graphs():
        for node in list(graph):
            if _does_nothing(node) and _bypass(node, graph):
                removed += 1
    return removed


def _does_nothing(node: ir.Node) -> bool:
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return node.inputs[0].dtype is not None and node.inputs[0].dtype == node.attributes.get_int("to", 0)
    if node.op_type == "Pad":
        pads = constant(node_input(node, 1))
        return pads is not None and not pads.any()
    return node.op_type == "Dropout" and not _mask_used(node) and not _training(node)


def _mask_used(node: ir.Node) -> bool:
    return any(o.uses() or o.is_graph_output() for o in node.outputs[1:])


def _training(node: ir.Node) -> bool:
    """Whether a Dropout drops: its third input is missing (False) or a constant, else it may."""
    flag = node_input(node, 2)
    if flag is None:
        return False
    values = constant(flag)
    return values is None or bool(values.any())


def _bypass(node: ir.Node, graph: ir.Graph) -> bool:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    if not output.is_graph_output():
        output.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        return True
    producer = source.producer()
    if producer is None or producer.graph is not graph or source.is_graph_output():
        return False
    replace_node(node, source)
    return True


def _release(node: ir.Node) -> None:
    """Let the bodies inside a node read nothing any more: a value counts what nodes of a removed body read too."""
    for body in bodies(node):
        for inner in body.all_nodes():
            for place in range(len(inner.inputs)):
                inner.replace_input_with(place, None)


def _drop_dead(graph: ir.Graph) -> int:
    """Remove nodes and weights that nothing uses. onnx-ir's own pass also switches BatchNormalization out of training
    mode in releases up to 1.0, which changes results."""
    dead = 0
    for node in reversed(graph):
        if not any(o.uses() or o.is_graph_output() for o in node.outputs):
            _release(node)
            graph.remove(node, safe=True)
            dead += 1
    drop_unused_initializers(graph)
    return dead
