"""Biases of int8 layers, in a form that ONNX Runtime leaves as it is.

At load, before any provider sees the graph, ONNX Runtime's WeightBiasQuantization divides the bias of a Conv,
ConvTranspose or Gemm behind a Q/DQ pair by the product of the layer's scales and makes it int32. It divides in the type
of the bias: float16 overflows where the bias is over 65504 steps, and the layer is lost. TensorRT takes no int32 bias
either. The optimizer matches a constant bias with one axis, so

- a Gemm's bias gets a second axis;
- a convolution's bias becomes the shift of a BatchNormalization behind it. Networks that were trained with Q/DQ pairs
  reach TensorRT in that form, and TensorRT folds the node into the convolution.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, drop_unused_initializers, insert_behind
from edgeq.graph.query import constant, is_op, node_input


def shield_biases(model: ir.Model) -> None:
    """Rewrite, in place, the bias of every layer whose operands are restored from int8."""
    editor = Editor(model)
    for node in tuple(model.graph):
        bias = node_input(node, 2) if is_op(node, "Conv", "ConvTranspose", "Gemm") else None
        values = constant(bias)
        if bias is None or values is None or values.ndim != 1:
            continue
        if not all(is_op(value.producer(), "DequantizeLinear") for value in node.inputs[:2] if value is not None):
            continue
        if node.op_type == "Gemm":
            node.replace_input_with(2, editor.constant(f"{bias.name}_row", values[np.newaxis]))
            continue
        ones, zeros = np.ones_like(values), np.zeros_like(values)
        one, zero = (editor.constant(f"{bias.name}_{name}", v) for name, v in (("unit", ones), ("zero", zeros)))
        node.resize_inputs(2)
        made = node.outputs[0]
        shifted = editor.node(
            "BatchNormalization",
            [made, one, bias, zero, one],
            f"{node.name}_bias",
            after=node,
            attributes={"epsilon": 0.0},
        )
        insert_behind(made, shifted, shifted, f"{made.name}_without_bias")
        made.type, made.shape = shifted.type, shifted.shape
    drop_unused_initializers(model.graph)
