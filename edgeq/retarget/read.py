"""What a quantized model is: its format, its integer types, and whether its scales make sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from edgeq.errors import ModelError
from edgeq.graph.operators import operator_of
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import constant, is_constant, is_op, name_of, node_input
from edgeq.records import computed
from edgeq.retarget.params import params_at, params_of, type_name
from edgeq.retarget.shift import is_weight

_DYNAMIC = frozenset({"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"})


@dataclass(frozen=True)
class Form:
    """How a model is quantized.

    Attributes:
        format: "QDQ", "QOperator" or "mixed"; "dynamic" where ranges are measured at run time.
        activations, weights: how many Q/DQ or QLinear places have which integer type.
        per_channel: whether any weight has a scale per channel.
        producer: the exporter, as it names itself.
    """

    format: str
    activations: Mapping[str, int]
    weights: Mapping[str, int]
    per_channel: bool
    producer: str

    @computed
    def pair(self) -> str:
        """Types of activations and weights in short form: "U8S8"; "U8+S8" where both occur."""
        both = (self.activations, self.weights)
        return "".join("+".join(_SHORT[name] for name in sorted(kinds)) for kinds in both)


_SHORT = {"uint8": "U8", "int8": "S8"}


def is_integer_operator(node: ir.Node) -> bool:
    """Whether a node takes integers and gives integers: one of QOperator form."""
    return node.op_type.startswith("QLinear") or node.op_type == "QGemm"


def read_form(model: ir.Model) -> Form:
    """The form of a model; its counts are empty where nothing is quantized with constant scales."""
    activations: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    per_channel = False
    for node in model.graph:
        for place in places(node):
            (weights if place.weight else activations)[type_name(place.params.dtype)] += 1
            per_channel |= place.weight and place.params.per_channel
    return Form(_format(model), dict(activations), dict(weights), per_channel, model.producer_name or "")


def _format(model: ir.Model) -> str:
    nodes = list(model.graph)
    integer = any(map(is_integer_operator, nodes))
    between = any(
        is_op(node, "Conv", "ConvTranspose", "Gemm", "MatMul")
        and any(v is not None and is_op(v.producer(), "DequantizeLinear") for v in node.inputs)
        for node in nodes
    )
    if integer:
        return "mixed" if between else "QOperator"
    if any(node.op_type in _DYNAMIC for node in nodes):
        return "mixed" if between else "dynamic"
    return "QDQ"


class Place(NamedTuple):
    """Where a node reads 8-bit integers: their tensor, their parameters, and whether they are a weight's."""

    tensor: str
    params: QuantParams
    weight: bool


def places(node: ir.Node) -> Iterator[Place]:
    """What a DequantizeLinear reads, and an operator with two integer operands."""
    if is_op(node, "DequantizeLinear"):
        params = params_of(node)
        if params is not None and params.dtype is not ir.DataType.INT32:
            yield Place(name_of(node.inputs[0]), params, is_weight(node))
        return
    row = operator_of(node)
    if row.integer_output is None or len(row.integers) != 2:
        return
    for operand in row.integers:
        value = node_input(node, operand.value)
        params = params_at(node, operand.scale) if operand.scale is not None else None
        if params is not None:
            yield Place(name_of(value), params, operand.value in row.weights and is_constant(value))


def check_form(model: ir.Model, path: Path) -> None:
    """Refuse scales and zero points that mean nothing.

    Raises:
        ModelError: names the first node and what is wrong with it.
    """
    for node in model.graph:
        if not is_op(node, "QuantizeLinear", "DequantizeLinear"):
            continue
        scale = constant(node.inputs[1])
        problem = _scale_problem(scale) if scale is not None else ""
        params = params_of(node)
        if not problem and params is not None:
            problem = _shape_problem(node, params)
        if problem:
            raise ModelError(f"{path}: {node.op_type} {node.name!r} {problem}", "Export the model again")


def _scale_problem(scale: np.ndarray) -> str:
    if not np.isfinite(scale).all():
        return "has a scale that is not finite"
    if (scale <= 0).any():
        return f"has the scale {scale.min():g}; scales are above 0"
    return ""


def _shape_problem(node: ir.Node, params: QuantParams) -> str:
    if params.zero_point.size not in (1, params.scale.size):
        return f"has {params.scale.size} scales and {params.zero_point.size} zero points"
    if not params.per_channel or params.block:
        return ""
    source = node.inputs[0]
    shape = source.shape if source is not None else None
    if shape is None:
        return ""
    if not -len(shape) <= params.axis < len(shape):
        return f"has the axis {params.axis}, its tensor {len(shape)} dimensions"
    size = shape[params.axis]
    if isinstance(size, int) and size != params.scale.size:
        return f"has {params.scale.size} scales along an axis of {size}"
    return ""
