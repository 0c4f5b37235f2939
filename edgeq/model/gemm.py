"""Gemm in the form that quantizers take: no factors, one bias for each output, weights that are read one way.

    Y = alpha A B + beta C        C of any shape that broadcasts to Y

ONNX Runtime's quantizer takes C for [outputs] and fails on everything else; alpha and beta have no integer form; and
where one B is read as it is by one layer and transposed by another, one scale per output cannot suit both.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, insert_behind
from edgeq.graph.query import is_op, node_input
from edgeq.model.constants import float_constant, output_channels, set_parameter


def plain_gemms(model: ir.Model, *, add_nodes: bool = True) -> int:
    """Bring every Gemm with constant weights into that form, in place. Results stay the same to float32's accuracy.

    Args:
        add_nodes: False leaves a bias that differs from row to row where it is; else an Add of its own takes it.

    Returns:
        How many nodes were changed.
    """
    changed = 0
    for graph in model.graphs():
        layers = [node for node in graph if is_op(node, "Gemm", "MatMul") and _is_matrix(node_input(node, 1))]
        editor = Editor(model, graph)
        for node in layers:
            if node.op_type == "Gemm":
                changed += any([_without_factors(node, editor), _without_other_shapes(node, editor, add_nodes)])
        changed += _one_way(layers, editor)
    return changed


def gemms_with_factors(model: ir.Model) -> frozenset[str]:
    """Names of the Gemm nodes of the main graph whose alpha or beta is not 1."""
    gemms = (node for node in model.graph if is_op(node, "Gemm"))
    return frozenset(
        node.name or "" for node in gemms if any(node.attributes.get_float(f, 1.0) != 1.0 for f in ("alpha", "beta"))
    )


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether it is a constant one; its numbers, which may be many, are not looked at."""
    known = value is not None and value.is_initializer() and not value.is_graph_input()
    return known and value is not None and value.shape is not None and len(value.shape) == 2


def _without_factors(node: ir.Node, editor: Editor) -> bool:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    given = node_input(node, 2)
    bias = float_constant(given) if beta != 1.0 else None
    if alpha == beta == 1.0 or (beta != 1.0 and given is not None and bias is None):
        return False
    weight = float_constant(node.inputs[1]) if alpha != 1.0 else None
    if weight is not None:
        set_parameter(editor, node, 1, weight * alpha)
    if bias is not None:
        set_parameter(editor, node, 2, bias * beta)
    node.attributes.pop("alpha", None)
    node.attributes.pop("beta", None)
    return True


def _without_other_shapes(node: ir.Node, editor: Editor, add_nodes: bool) -> bool:
    weight, given = node.inputs[1], node_input(node, 2)
    assert weight is not None
    assert weight.shape is not None
    bias = float_constant(given)
    outputs = output_channels(node, weight.shape.numpy())
    if given is None or bias is None or bias.shape == (outputs,):
        return False
    if bias.size == 1 or (bias.size == outputs and bias.shape[-1] == outputs):
        set_parameter(editor, node, 2, np.broadcast_to(bias.ravel(), (outputs,)))
        return True
    if not add_nodes:
        return False
    # It differs from row to row: added by a node of its own.
    product = node.outputs[0]
    name = editor.free_value_name(f"{product.name}/product")
    node.resize_inputs(2)
    added = editor.node("Add", [product, given], f"{node.name}/bias", after=node)
    insert_behind(product, added, added, name)
    product.type, product.shape = added.type, added.shape
    return True


def _one_way(layers: list[ir.Node], editor: Editor) -> int:
    """A copy of the weights for those that read them the other way than the first."""
    first: dict[ir.Value | None, int] = {}
    changed = 0
    for node in layers:
        value = node.inputs[1]
        transposed = node.attributes.get_int("transB", 0) if node.op_type == "Gemm" else 0
        if first.setdefault(value, transposed) != transposed and (weight := float_constant(value)) is not None:
            set_parameter(editor, node, 1, weight)
            changed += 1
    return changed
