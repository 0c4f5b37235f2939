"""Write integer operators out as float operators: QLinearConv as DequantizeLinear, Conv and QuantizeLinear, and so on.

Then the result of a layer, before it is rounded to integers, is a tensor that can be read and changed.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import (
    Operator,
    channel_axis,
    constant,
    name_of,
    node_input,
    operator_of,
)

PLAIN = "/plain"
"""Suffix that makes the name of an expanded layer's float tensor from the name of its integer output."""


def expand_integers(model: ir.Model) -> ir.Model:
    """Return a copy of `model` with QLinearConv, QLinearMatMul and QGemm written out as float operators. The names of
    these nodes are lost. If there are none, return `model` itself.
    """
    if not any(map(_is_integer_layer, model.graph)):
        return model
    model = model.clone()
    editor = Editor(model)
    for node in model.graph:
        if _is_integer_layer(node):
            _expand(editor, node, operator_of(node))
    return model


def _is_integer_layer(node: ir.Node) -> bool:
    row = operator_of(node)
    return bool(row.integer_output and row.weights and len(row.integers) == 2)


def _expand(editor: Editor, node: ir.Node, row: Operator) -> None:
    assert row.integer_output is not None
    output = node.outputs[0]
    stem = name_of(output)
    inputs: list[ir.Value | None] = []
    for operand, axis in zip(row.integers, (0, channel_axis(node)), strict=True):
        sources = [node_input(node, place) for place in (operand.value, operand.scale, operand.zero_point)]
        name = f"{stem}/input{len(inputs)}"
        inputs.append(editor.node("DequantizeLinear", sources, name, before=node, attributes={"axis": axis}))
    bias = node_input(node, row.bias)
    if bias is not None:
        scales = [constant(node_input(node, operand.scale)) for operand in row.integers]
        assert scales[0] is not None
        assert scales[1] is not None
        # The bias has the unit of the product of the integers, because it is added before alpha scales the sum.
        product = scales[0] * scales[1] * np.float32(node.attributes.get_float("alpha", 1.0))
        scale = editor.constant(f"{stem}/bias_scale", product if product.size > 1 else product.reshape(()))
        inputs.append(
            editor.node("DequantizeLinear", [bias, scale], f"{stem}/bias", before=node, attributes={"axis": 0})
        )
    attributes = dict(node.attributes)
    float_output = editor.node(row.float_form, inputs, stem + PLAIN, before=node, attributes=attributes)
    parameters = [node_input(node, place) for place in row.integer_output]
    # A QGemm without a scale for its output computes floats.
    op_type = "QuantizeLinear" if parameters[0] is not None else "Identity"
    sources = [float_output, *parameters] if parameters[0] is not None else [float_output]
    rounded = editor.node(op_type, sources, f"{stem}/rounded", before=node, like=output)
    replace_value(output, rounded)
    editor.graph.remove(node)
