"""Clean a graph: remove dead code, nodes that do nothing, and the exporter's notes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass

from edgeq.model.edit import drop_unused_initializers, replace_node
from edgeq.model.graph import bodies, constant, is_random, node_input


def tidy(model: ir.Model) -> int:
    """Turn weights into constants that no input can override, turn Constant nodes into initializers, and remove dead
    code.

    Returns:
        The number of nodes that were removed because no output depends on them.
    """
    # A weight that an input may override is not a constant, and nothing could be folded into it.
    RemoveInitializersFromInputsPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    dropped, previous_count = 0, -1
    while dropped != previous_count:  # The next round removes a node that was used only by a dead node in a branch.
        previous_count = dropped
        dropped += sum(_drop_dead(graph) for graph in model.graphs())
    return dropped


def forget_origin(model: ir.Model) -> None:
    """Remove, in place, the exporter's notes on where nodes and inner tensors come from: source lines, stack traces,
    module paths. No runtime reads these notes. They contain file names of the exporting machine, and PyTorch's notes
    can take more space than the weights of a small int8 model. The descriptions of the model, its inputs and its
    outputs stay.
    """
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
    """Bypass, in place, nodes that change nothing: Identity, Dropout outside training mode, and some Casts and Pads.

    - If the node's output is not a graph output, all nodes that read it read the node's input instead.
    - If the node's output is a graph output, the node's input takes over its name. This is possible only if a node of
      the same graph computes that input, and the input is not a graph output itself.
    - In all other cases the node stays, because its output is a second name for a graph input, a weight or another
      graph output.

    Returns:
        The number of nodes that were removed.
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
    return node.op_type == "Dropout" and not _is_mask_used(node) and not is_random(node)


def _is_mask_used(node: ir.Node) -> bool:
    return any(o.uses() or o.is_graph_output() for o in node.outputs[1:])


def _bypass(node: ir.Node, graph: ir.Graph) -> bool:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None
    if not output.is_graph_output():
        output.replace_all_uses_with(source)
        graph.remove(node, safe=True)
        return True
    # Only a tensor that a node of this graph computes can take over the name of an output.
    producer = source.producer()
    if producer is None or producer.graph is not graph or source.is_graph_output():
        return False
    replace_node(node, source)
    return True


def _release(node: ir.Node) -> None:
    """Disconnect the bodies inside a node from all values. Otherwise the uses of a value would still include nodes of
    removed bodies.
    """
    for body in bodies(node):
        for inner in body.all_nodes():
            for place in range(len(inner.inputs)):
                inner.replace_input_with(place, None)


def _drop_dead(graph: ir.Graph) -> int:
    """Remove unused nodes and weights, and return the number of removed nodes.

    The pass of onnx-ir is not used. It does not count, and it leaves unused weights in bodies. It also drops unused
    outputs of BatchNormalization, up to release 1.0 together with its training mode, which changes results.
    """
    dead = 0
    for node in reversed(graph):
        if not any(o.uses() or o.is_graph_output() for o in node.outputs):
            _release(node)
            graph.remove(node, safe=True)
            dead += 1
    drop_unused_initializers(graph)
    return dead
