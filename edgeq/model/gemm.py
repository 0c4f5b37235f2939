"""Gemm in the form that quantizers take: no factors, one bias for each output, weights that are read one way.

    Y = alpha A B + beta C        C of any shape that broadcasts to Y

ONNX Runtime's quantizer takes C for [outputs] and fails on everything else; alpha and beta have no integer form; and
where one B is read as it is by one layer and transposed by another, one scale per output cannot suit both.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.clean import take_over
from edgeq.model.constants import constant_values, free_name, store_constant


def plain_gemms(model: ir.Model) -> int:
    """Bring every Gemm with constant weights into that form, in place. Results stay the same to float32's accuracy.

    Returns:
        How many nodes were changed.
    """
    changed = 0
    for graph in model.graphs():
        for node in list(graph):
            if node.op_type == "Gemm" and node.domain == "" and _is_matrix(node.inputs[1]):
                changed += any([_without_factors(node), _without_other_shapes(node, graph)])
        changed += _one_way(graph)
    return changed


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether it is a constant one; its numbers, which may be many, are not looked at."""
    known = value is not None and value.is_initializer() and not value.is_graph_input()
    return known and value is not None and value.shape is not None and len(value.shape) == 2


def _without_factors(node: ir.Node) -> bool:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    given = node.inputs[2] if len(node.inputs) > 2 else None
    bias = constant_values(given) if beta != 1.0 else None
    if alpha == beta == 1.0 or (beta != 1.0 and given is not None and bias is None):
        return False
    weight = constant_values(node.inputs[1]) if alpha != 1.0 else None
    if weight is not None:
        store_constant(node, 1, weight * alpha)
    if bias is not None:
        store_constant(node, 2, bias * beta)
    node.attributes.pop("alpha", None)
    node.attributes.pop("beta", None)
    return True


def _without_other_shapes(node: ir.Node, graph: ir.Graph | ir.Function) -> bool:
    weight, given = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    assert weight is not None
    assert weight.shape is not None
    bias = constant_values(given)
    outputs = int(weight.shape.numpy()[0 if node.attributes.get_int("transB", 0) else 1])
    if given is None or bias is None or bias.shape == (outputs,):
        return False
    if bias.size == 1 or (bias.size == outputs and bias.shape[-1] == outputs):
        store_constant(node, 2, np.broadcast_to(bias.ravel(), (outputs,)))
        return True
    if not isinstance(graph, ir.Graph):
        return False
    # It differs from row to row: added by a node of its own.
    product = node.outputs[0]
    name = free_name(f"{product.name}/product", graph)
    node.resize_inputs(2)
    added = ir.node("Add", [product, given], name=f"{node.name}/bias")
    graph.insert_after(node, added)
    take_over(product, added.outputs[0])
    added.replace_input_with(0, product)
    product.name = name
    return True


def _one_way(graph: ir.Graph | ir.Function) -> int:
    """A copy of the weights for those that read them the other way than the first."""
    first: dict[str, int] = {}
    changed = 0
    for node in graph:
        if node.domain != "" or node.op_type not in ("Gemm", "MatMul") or len(node.inputs) < 2:
            continue
        value = node.inputs[1]
        if value is None or value.name is None or not _is_matrix(value):
            continue
        transposed = node.attributes.get_int("transB", 0) if node.op_type == "Gemm" else 0
        if first.setdefault(value.name, transposed) != transposed and (weight := constant_values(value)) is not None:
            store_constant(node, 1, weight)
            changed += 1
    return changed
