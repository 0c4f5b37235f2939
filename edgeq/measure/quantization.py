"""Where a quantized graph keeps scales and zero points, and of which tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.index import GraphIndex
from edgeq.graph.operators import DATA_MOVEMENT, channel_axis, integer_inputs, operator_of
from edgeq.graph.quant_params import LIMITS, QuantParams, params_at
from edgeq.graph.query import constant, constant_tensor, is_constant, name_of, node_input


@dataclass(frozen=True, eq=False)
class IntegerUse:
    """An integer tensor, and how the node that reads it interprets it.

    Attributes:
        value: the tensor, an activation or a constant.
        node, place: the reader, and which of its inputs the tensor is.
        params: the scale and zero point that the reader has for it.
    """

    value: ir.Value
    node: ir.Node
    place: int
    params: QuantParams


def integer_uses(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Every integer input with a constant scale of every quantized operator, in order; int32 biases too."""
    for node in graph.graph:
        for places in integer_inputs(node):
            value = node_input(node, places.value)
            if value is None:
                continue
            if places.scale is None:
                params = _scaled_sums(node, value, places.zero_point)
            else:
                axis = channel_axis(node)
                params = params_at(node, places.scale, places.zero_point, integers=value, axis=axis)
            if params is not None:
                yield IntegerUse(value, node, places.value, params)
        bias = _bias(node)
        if bias is not None:
            yield bias


def activation_params(graph: GraphIndex) -> dict[str, QuantParams]:
    """Integer activation → its scale and zero point, where they are constant."""
    found: dict[str, QuantParams] = {}
    for use in integer_uses(graph):
        if not is_constant(use.value):
            found.setdefault(name_of(use.value), use.params)
    for node in graph.graph:
        places = operator_of(node).integer_output
        if places is not None:
            made = params_at(node, *places, integers=node.outputs[0])
            if made is not None:
                found.setdefault(name_of(node.outputs[0]), made)
        elif node.op_type in DATA_MOVEMENT and node.inputs:
            moved = found.get(name_of(node.inputs[0]))
            if moved is not None:
                for output in node.outputs:
                    found.setdefault(name_of(output), moved)
    return found


def _scaled_sums(node: ir.Node, weight: ir.Value, zero_point: int) -> QuantParams | None:
    """Of the weight of ConvInteger and MatMulInteger: the sums are cast and multiplied by activation scale x weight
    scale behind the node."""
    tensor = constant_tensor(weight)
    if tensor is None or tensor.dtype not in LIMITS:
        return None
    scale, zero_value = _constant_factor(node.outputs[0], depth=3), node_input(node, zero_point)
    zeros = constant(zero_value)
    if scale is None or (zero_value is not None and zeros is None):
        return None
    zero = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    return QuantParams(scale.astype(np.float32), zero, tensor.dtype, axis=channel_axis(node))


def _constant_factor(value: ir.Value, *, depth: int) -> NDArray[Any] | None:
    """The constant that a tensor is multiplied by, directly or as a part of the other factor."""
    for node, place in value.uses() if depth else []:
        if node.op_type == "Cast":
            return _constant_factor(node.outputs[0], depth=depth - 1)
        if node.op_type == "Mul":
            other = node.inputs[1 - place]
            maker = other.producer() if other is not None else None
            parts = [other, *(maker.inputs if maker is not None and maker.op_type == "Mul" else ())]
            return next((found for found in map(constant, parts) if found is not None), None)
    return None


def _bias(node: ir.Node) -> IntegerUse | None:
    """The int32 bias of QLinearConv and QGemm: zero point 0, scale = the input's times the weight's."""
    row = operator_of(node)
    bias = node_input(node, row.bias)
    if bias is None or row.bias is None or row.integer_output is None or not is_constant(bias):
        return None
    scales = [constant(node_input(node, places.scale)) for places in row.integers]
    if scales[0] is None or scales[1] is None:
        return None
    scale = (scales[0] * scales[1]).astype(np.float32)
    return IntegerUse(bias, node, row.bias, QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32))
