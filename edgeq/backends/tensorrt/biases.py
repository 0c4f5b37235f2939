"""Give the biases of int8 layers a form that ONNX Runtime leaves alone.

ONNX Runtime would change these biases. When it loads a model, before any provider gets the graph, its
optimizer WeightBiasQuantization converts the biases of Conv, ConvTranspose and Gemm layers after Q/DQ pairs to int32.
It divides a bias by the product of the layer's scales, in the type of the bias. In float16, a bias of more than 65504
steps overflows and makes the layer's result useless. TensorRT does not support an int32 bias either. The optimizer
matches only a constant bias with one axis. So edgeq gives the biases another form:

- a Gemm's bias gets a second axis;
- a convolution's bias becomes the shift of a BatchNormalization after the convolution. Networks trained with Q/DQ pairs
  reach TensorRT in that form, and TensorRT folds the node into the convolution.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, drop_unused_initializers, insert_behind
from edgeq.model.graph import constant, is_op, node_input


def shield_biases(model: ir.Model) -> None:
    """Change the form of biases, in place, so that ONNX Runtime does not convert them. This affects every layer whose
    operands are dequantized from int8.
    """
    editor = Editor(model)
    for node in tuple(model.graph):
        bias = node_input(node, 2) if is_op(node, "Conv", "ConvTranspose", "Gemm") else None
        values = constant(bias)
        if bias is None or values is None or values.ndim != 1:
            continue
        # The optimizer leaves the biases of float layers alone, so these keep their form.
        if not all(is_op(value.producer(), "DequantizeLinear") for value in node.inputs[:2] if value is not None):
            continue
        if node.op_type == "Gemm":
            node.replace_input_with(2, editor.constant(f"{bias.name}_row", values[np.newaxis]))
            continue
        # With scale 1, mean 0, variance 1 and epsilon 0, the node computes x + bias exactly.
        ones, zeros = np.ones_like(values), np.zeros_like(values)
        unit, zero = (editor.constant(f"{bias.name}_{name}", v) for name, v in (("unit", ones), ("zero", zeros)))
        node.resize_inputs(2)
        output = node.outputs[0]
        shifted = editor.node(
            "BatchNormalization",
            [output, unit, bias, zero, unit],
            f"{node.name}_bias",
            after=node,
            attributes={"epsilon": 0.0},
        )
        # The new node's result takes over the layer's name, under which readers and ranges know the sum with the bias.
        insert_behind(output, shifted, shifted, f"{output.name}_without_bias")
        output.type, output.shape = shifted.type, shifted.shape
    drop_unused_initializers(model.graph)
