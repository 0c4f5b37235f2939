"""Read a quantized model: its format, its integer types, and whether its scales make sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from edgeq.errors import ModelError
from edgeq.model.graph import (
    constant,
    is_constant,
    is_op,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.quant_params import QuantParams
from edgeq.retargeting.shift import is_weight, params_at, params_of, type_name
from edgeq.util.records import computed

# These measure the range of their input in each run.
_DYNAMIC = frozenset({"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"})


@dataclass(frozen=True)
class Form:
    """Describe how a model is quantized.

    Attributes:
        format: "QDQ", "QOperator" or "mixed"; "dynamic" if ranges are measured at run time.
        activations, weights: number of Q/DQ or QLinear operands of each integer type.
        per_channel: whether any weight has a scale per channel.
        producer: the exporter's name, as the file states it.
    """

    format: str
    activations: Mapping[str, int]
    weights: Mapping[str, int]
    per_channel: bool
    producer: str

    @computed
    def pair(self) -> str:
        """Return the types of activations and weights in short form: "U8S8", or "S8+U8S8" if activations have both
        types.
        """
        both = (self.activations, self.weights)
        return "".join("+".join(_SHORT[name] for name in sorted(kinds)) for kinds in both)


_SHORT = {"uint8": "U8", "int8": "S8"}


def is_integer_operator(node: ir.Node) -> bool:
    """Return whether a node has QOperator form, which means that its inputs and outputs are integers."""
    return node.op_type.startswith("QLinear") or node.op_type == "QGemm"


def read_form(model: ir.Model) -> Form:
    """Return the form of a model. All its counts are empty if nothing is quantized with constant scales."""
    activations: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    per_channel = False
    for node in model.graph:
        for place in quantized_inputs(node):
            (weights if place.weight else activations)[type_name(place.params.dtype)] += 1
            per_channel |= place.weight and place.params.per_channel
    return Form(_format(model), dict(activations), dict(weights), per_channel, model.producer_name or "")


def _format(model: ir.Model) -> str:
    nodes = list(model.graph)
    integer = any(map(is_integer_operator, nodes))
    # A float operator behind a DequantizeLinear shows a model with Q/DQ pairs.
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


class QuantizedInput(NamedTuple):
    """Describe an input through which a node reads 8-bit integers: its tensor, its parameters, and whether it is a
    weight.
    """

    tensor: str
    params: QuantParams
    weight: bool


def quantized_inputs(node: ir.Node) -> Iterator[QuantizedInput]:
    """Yield the 8-bit input of a DequantizeLinear, or both operands of an operator that has two integer operands."""
    if is_op(node, "DequantizeLinear"):
        params = params_of(node)
        if params is not None and params.dtype is not ir.DataType.INT32:
            yield QuantizedInput(name_of(node.inputs[0]), params, is_weight(node))
        return
    row = operator_of(node)
    if row.integer_output is None or len(row.integers) != 2:
        return
    for operand in row.integers:
        value = node_input(node, operand.value)
        params = params_at(node, operand.scale) if operand.scale is not None else None
        if params is not None:
            yield QuantizedInput(name_of(value), params, operand.value in row.weights and is_constant(value))


def check_form(model: ir.Model, path: Path) -> None:
    """Refuse scales and zero points that make no sense.

    Raises:
        ModelError: a node has such scales or zero points; the message names the first such node and its fault.
    """
    for node in model.graph:
        problem = _find_fault(node) if is_op(node, "QuantizeLinear", "DequantizeLinear") else ""
        if problem:
            raise ModelError(f"{path}: {node.op_type} {node.name!r} {problem}", "Export the model again")


def _find_fault(node: ir.Node) -> str:
    """Return the fault in the scales of a Q or DQ node, or "" if there is none."""
    scale, params, source = constant(node.inputs[1]), params_of(node), node.inputs[0]
    if scale is not None and not np.isfinite(scale).all():
        return "has a scale that is not finite"
    # With a scale of 0, all integers stand for the same number, and kernels expect positive scales.
    if scale is not None and (scale <= 0).any():
        return f"has the scale {scale.min():g}; scales are above 0"
    if params is not None and params.zero_point.size not in (1, params.scale.size):
        return f"has {params.scale.size} scales and {params.zero_point.size} zero points"
    shape = source.shape if source is not None else None
    # The checks below compare the scales with the dimensions of the tensor, if they are known.
    if params is None or not params.per_channel or params.block or shape is None:
        return ""
    if not -len(shape) <= params.axis < len(shape):
        return f"has the axis {params.axis}, but its tensor has {len(shape)} dimensions"
    size = shape[params.axis]
    if isinstance(size, int) and size != params.scale.size:
        return f"has {params.scale.size} scales along an axis of {size}"
    return ""
