"""Integer operators written out: QLinearConv as DequantizeLinear, Conv and QuantizeLinear, and so on.

What a layer computes before it is rounded to integers is a tensor then, which can be looked at and changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

PLAIN = "/plain"
"""What the float tensor of an expanded layer has behind the name of its integer output."""

# Operator → float operator, places of (value, scale, zero point) of its data inputs, of its bias, and of (scale, zero
# point) of its output.
_FORMS: Mapping[str, tuple[str, tuple[tuple[int, int, int], ...], int, tuple[int, int]]] = {
    "QLinearConv": ("Conv", ((0, 1, 2), (3, 4, 5)), 8, (6, 7)),
    "QLinearMatMul": ("MatMul", ((0, 1, 2), (3, 4, 5)), 8, (6, 7)),
    "QGemm": ("Gemm", ((0, 1, 2), (3, 4, 5)), 6, (7, 8)),
}


def expanded(model: onnx.ModelProto) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """The nodes of `model` with QLinearConv, QLinearMatMul and QGemm written out, and the constants that this needs
    besides those of the model: the scales of int32 biases."""
    scales = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    extra: list[onnx.TensorProto] = []
    for node in model.graph.node:
        if node.op_type in _FORMS:
            nodes.extend(_expand(node, scales, extra))
        else:
            nodes.append(node)
    return nodes, extra


def _expand(
    node: onnx.NodeProto, scales: Mapping[str, onnx.TensorProto], extra: list[onnx.TensorProto]
) -> Iterator[onnx.NodeProto]:
    op_type, data, bias, made = _FORMS[node.op_type]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    stem = node.output[0]
    axes = (0, 0 if op_type == "Conv" or attributes.get("transB") else -1)
    inputs: list[str] = []
    for (value, scale, zero), axis in zip(data, axes, strict=True):
        name = f"{stem}/input{len(inputs)}"
        yield helper.make_node(
            "DequantizeLinear", [node.input[i] for i in (value, scale, zero)], [name], name=name, axis=axis
        )
        inputs.append(name)
    if op_type != "MatMul" and len(node.input) > bias and node.input[bias]:
        pair = (numpy_helper.to_array(scales[node.input[scale]]).astype(np.float32) for _, scale, _ in data)
        # In the unit of the integers' product: it is added before alpha scales them.
        product = np.multiply(*pair) * np.float32(attributes.get("alpha", 1.0))
        extra.append(
            numpy_helper.from_array(product if product.size > 1 else product.reshape(()), f"{stem}/bias_scale")
        )
        yield helper.make_node(
            "DequantizeLinear", [node.input[bias], extra[-1].name], [f"{stem}/bias"], name=f"{stem}/bias", axis=0
        )
        inputs.append(f"{stem}/bias")
    yield helper.make_node(op_type, inputs, [stem + PLAIN], name=node.name, **attributes)
    # QGemm without a scale for its output gives floats.
    if len(node.input) > made[0] and node.input[made[0]]:
        quantized = [stem + PLAIN, *(node.input[i] for i in made)]
        yield helper.make_node("QuantizeLinear", quantized, [stem], name=f"{stem}/rounded")
    else:
        yield helper.make_node("Identity", [stem + PLAIN], [stem], name=f"{stem}/rounded")
