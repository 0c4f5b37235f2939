"""Find each integer tensor of a quantized model, with the scale and zero point with which a node reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import (
    DATA_MOVEMENT,
    GraphIndex,
    channel_axis,
    constant,
    constant_tensor,
    integer_inputs,
    is_constant,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.quant_params import LIMITS, QuantParams, params_at


@dataclass(frozen=True, eq=False)
class IntegerUse:
    """Describe an integer tensor, and how a node that reads it interprets it.

    Attributes:
        value: the tensor, an activation or a constant.
        node: the node that reads the tensor.
        place: index of the tensor among the node's inputs.
        params: scale and zero point of the tensor for this node.
    """

    value: ir.Value
    node: ir.Node
    place: int
    params: QuantParams


def find_integer_uses(graph: GraphIndex) -> Iterator[IntegerUse]:
    """Yield every integer input of every quantized operator, in order, if its scale is constant. This includes int32
    biases.
    """
    for node in graph.graph:
        for places in integer_inputs(node):
            value = node_input(node, places.value)
            if value is None:
                continue
            # ConvInteger and MatMulInteger have no scale. The nodes after them apply it.
            if places.scale is None:
                params = _find_weight_params(node, value, places.zero_point)
            else:
                axis = channel_axis(node)
                params = params_at(node, places.scale, places.zero_point, integers=value, axis=axis)
            if params is not None:
                yield IntegerUse(value, node, places.value, params)
        bias = _find_bias(node)
        if bias is not None:
            yield bias


def find_activation_params(graph: GraphIndex) -> dict[str, QuantParams]:
    """Return the scale and zero point of each integer activation by name, if they are constant."""
    params_by_tensor: dict[str, QuantParams] = {}
    for use in find_integer_uses(graph):
        if not is_constant(use.value):
            params_by_tensor.setdefault(name_of(use.value), use.params)
    for node in graph.graph:
        places = operator_of(node).integer_output
        if places is not None:
            params = params_at(node, *places, integers=node.outputs[0])
            if params is not None:
                params_by_tensor.setdefault(name_of(node.outputs[0]), params)
        # Operators that only move data keep the scale of their input.
        elif node.op_type in DATA_MOVEMENT and node.inputs:
            moved = params_by_tensor.get(name_of(node.inputs[0]))
            if moved is not None:
                for output in node.outputs:
                    params_by_tensor.setdefault(name_of(output), moved)
    return params_by_tensor


def _find_weight_params(node: ir.Node, weight: ir.Value, zero_point: int) -> QuantParams | None:
    """Return the parameters of the weight of a ConvInteger or MatMulInteger. Return None if its scale is not found.

    The nodes after the operator cast its sums and multiply them by (activation scale x weight scale).
    """
    tensor = constant_tensor(weight)
    if tensor is None or tensor.dtype not in LIMITS:
        return None
    # Quantizers write a Cast and a product after the operator. Three nodes allow for one Cast more.
    scale, zero_value = _find_constant_factor(node.outputs[0], depth=3), node_input(node, zero_point)
    zeros = constant(zero_value)
    if scale is None or (zero_value is not None and zeros is None):
        return None
    # A missing zero point is 0, by the definition of the operators.
    zero = np.zeros((), np.int64) if zeros is None else zeros.astype(np.int64)
    return QuantParams(scale.astype(np.float32), zero, tensor.dtype, axis=channel_axis(node))


def _find_constant_factor(value: ir.Value, *, depth: int) -> NDArray[Any] | None:
    """Return the constant by which a tensor is multiplied. The constant may be the other factor of a product, or a part
    of that factor.
    """
    for node, place in value.uses() if depth else []:
        if node.op_type == "Cast":
            return _find_constant_factor(node.outputs[0], depth=depth - 1)
        if node.op_type == "Mul":
            factor = node.inputs[1 - place]
            maker = factor.producer() if factor is not None else None
            parts = [factor, *(maker.inputs if maker is not None and maker.op_type == "Mul" else ())]
            return next((array for array in map(constant, parts) if array is not None), None)
    return None


def _find_bias(node: ir.Node) -> IntegerUse | None:
    """Return the int32 bias of a QLinearConv or QGemm. Its zero point is 0, and its scale is the scale of the input
    times that of the weight.
    """
    row = operator_of(node)
    bias = node_input(node, row.bias)
    if bias is None or row.bias is None or row.integer_output is None or not is_constant(bias):
        return None
    scales = [constant(node_input(node, places.scale)) for places in row.integers]
    if scales[0] is None or scales[1] is None:
        return None
    scale = (scales[0] * scales[1]).astype(np.float32)
    return IntegerUse(bias, node, row.bias, QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32))
