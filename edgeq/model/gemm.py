"""Bring Gemm into the form that quantizers accept: no factors, one bias for each output, and weights that all layers
read in the same direction.

    Y = alpha A B + beta C        C of any shape that broadcasts to Y

ONNX Runtime's quantizer accepts C of shape [outputs] and fails on all others. alpha and beta have no integer form. If
one layer reads B unchanged and another reads it transposed, the same scales per output cannot fit both.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, insert_behind
from edgeq.model.graph import (
    is_op,
    node_input,
)
from edgeq.model.parameters import float_constant, output_channels, set_parameter


def plain_gemms(model: ir.Model, *, add_nodes: bool = True) -> int:
    """Bring every Gemm with constant weights into the form that quantizers accept, in place. Results stay the same to
    float32's accuracy.

    Args:
        add_nodes: whether to move a bias that differs from row to row into a separate Add. If not, such a bias stays.

    Returns:
        The number of nodes that were changed.
    """
    changed = 0
    for graph in model.graphs():
        # MatMul counts too, because it reads shared weights in one direction only.
        layers = [node for node in graph if is_op(node, "Gemm", "MatMul") and _is_matrix(node_input(node, 1))]
        editor = Editor(model, graph)
        for node in layers:
            if node.op_type == "Gemm":
                changed += any([_fold_factors(node, editor), _fit_bias(node, editor, add_nodes)])
        changed += _copy_transposed(layers, editor)
    return changed


def gemms_with_factors(model: ir.Model) -> frozenset[str]:
    """Return the names of the Gemm nodes of the main graph whose alpha or beta is not 1."""
    gemms = (node for node in model.graph if is_op(node, "Gemm"))
    return frozenset(
        node.name or "" for node in gemms if any(node.attributes.get_float(f, 1.0) != 1.0 for f in ("alpha", "beta"))
    )


def _is_matrix(value: ir.Value | None) -> bool:
    """Return whether a value is a constant matrix. Its data, which may be large, is not read."""
    is_weight = value is not None and value.is_initializer() and not value.is_graph_input()
    return is_weight and value is not None and value.shape is not None and len(value.shape) == 2


def _fold_factors(node: ir.Node, editor: Editor) -> bool:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    bias_input = node_input(node, 2)
    bias = float_constant(bias_input) if beta != 1.0 else None
    weight = float_constant(node.inputs[1]) if alpha != 1.0 else None
    unknown = (alpha != 1.0 and weight is None) or (beta != 1.0 and bias_input is not None and bias is None)
    # A factor that stays would change the result if the other one were folded alone.
    if alpha == beta == 1.0 or unknown:
        return False
    if weight is not None:
        set_parameter(editor, node, 1, weight * alpha)
    if bias is not None:
        set_parameter(editor, node, 2, bias * beta)
    node.attributes.pop("alpha", None)
    node.attributes.pop("beta", None)
    return True


def _fit_bias(node: ir.Node, editor: Editor, add_nodes: bool) -> bool:
    weight, bias_input = node.inputs[1], node_input(node, 2)
    assert weight is not None
    assert weight.shape is not None
    bias = float_constant(bias_input)
    outputs = output_channels(node, weight.shape.numpy())
    if bias_input is None or bias is None or bias.shape == (outputs,):
        return False
    if bias.size == 1 or (bias.size == outputs and bias.shape[-1] == outputs):
        set_parameter(editor, node, 2, np.broadcast_to(bias.ravel(), (outputs,)))
        return True
    if not add_nodes:
        return False
    # The bias differs from row to row, so a separate Add must add it.
    product = node.outputs[0]
    name = editor.free_value_name(f"{product.name}/product")
    node.resize_inputs(2)
    added = editor.node("Add", [product, bias_input], f"{node.name}/bias", after=node)
    insert_behind(product, added, added, name)
    product.type, product.shape = added.type, added.shape
    return True


def _copy_transposed(layers: list[ir.Node], editor: Editor) -> int:
    """Give a copy of the weights to each layer that reads them in a direction other than that of the first reader.
    Return the number of copies.
    """
    directions: dict[ir.Value | None, int] = {}
    changed = 0
    for node in layers:
        value = node.inputs[1]
        transposed = node.attributes.get_int("transB", 0) if node.op_type == "Gemm" else 0
        if directions.setdefault(value, transposed) != transposed and (weight := float_constant(value)) is not None:
            set_parameter(editor, node, 1, weight)
            changed += 1
    return changed
