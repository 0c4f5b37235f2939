"""Read the integer inputs and the integer output of an operator from the Q/DQ nodes around it.

`read_sides` decides whether an operator can become an integer operator, and gives the reason if it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor
from edgeq.model.graph import channel_axis, clamp_bounds, is_op, node_input, only_reader
from edgeq.model.quant_params import QuantParams
from edgeq.retargeting.shift import params_of, type_name


@dataclass(frozen=True, eq=False)
class In:
    """Describe an input that comes from a DequantizeLinear: its integers, and their scale and zero point."""

    value: ir.Value
    params: QuantParams


@dataclass(frozen=True, eq=False)
class Out:
    """Describe the nodes after an operator: the QuantizeLinear of its output, and the clamp before that, if any."""

    quantize: ir.Node
    params: QuantParams
    clamp: ir.Node | None


Sides = tuple[list[In], Out]
"""The inputs and the output of an operator."""


def _input(node: ir.Node, place: int) -> In | None:
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or not is_op(maker, "DequantizeLinear"):
        return None
    params, source = params_of(maker), maker.inputs[0]
    return In(source, params) if params is not None and source is not None else None


def _output(node: ir.Node) -> Out | None:
    # Exporters put a Relu between an operator and its QuantizeLinear.
    user, clamp = only_reader(node.outputs[0]), None
    if is_op(user, "Relu", "Clip"):
        clamp = user
        assert clamp is not None
        user = only_reader(clamp.outputs[0])
    if user is None or not is_op(user, "QuantizeLinear"):
        return None
    params = params_of(user)
    return Out(user, params, clamp) if params is not None and not params.per_channel else None


def read_sides(node: ir.Node, count: int) -> Sides | str:
    """Return the first `count` inputs and the output of an operator. If it has no integer form, return the reason."""
    inputs = [_input(node, place) for place in range(count)]
    out = _output(node)
    connected = [i for i in inputs if i is not None]
    if len(connected) < len(inputs):
        return "an input is not quantized"
    if out is None:
        return "its output is not quantized, or other nodes read it before it is"
    if not has_constant_clamp(out):
        return "the bounds of its Clip are not constant"
    # Integer kernels have one type for the activations on both sides.
    if connected[0].params.dtype != out.params.dtype:
        return f"it reads {type_name(connected[0].params.dtype)} and outputs {type_name(out.params.dtype)}"
    if connected[0].params.per_channel:
        return "its input has a scale per channel"
    return connected, out


def product_problem(node: ir.Node, operands: list[In]) -> str:
    """Return the reason why a Conv, MatMul or Gemm with these inputs has no integer form, or "" if it has one."""
    data, weight = operands
    if weight.params.block:
        return "its weight has a scale for each block"
    if weight.params.per_channel:
        rank = len(weight.value.shape) if weight.value.shape is not None else None
        # Kernels scale each sum once, so its products must have one scale.
        if rank is None or weight.params.axis % rank != channel_axis(node) % rank:
            return "its weight has a scale for each input channel"
        if node.op_type == "MatMul" and rank != 2:
            return "its weight has a scale per channel and is not a matrix"
    # ONNX Runtime has all other combinations of the two types.
    if (data.params.dtype, weight.params.dtype) == (ir.DataType.INT8, ir.DataType.UINT8):
        return "int8 activations with uint8 weights have no kernel"
    return ""


def clamp_integers(value: ir.Value, out: Out, editor: Editor) -> ir.Value:
    """Return the integers, clamped to the range that the Relu or Clip before the QuantizeLinear sets for the floats."""
    bounds = clamp_bounds(out.clamp) if out.clamp is not None else None
    if bounds is None:
        return value
    ends = [out.params.quantize(np.asarray(bound, np.float32)) for bound in bounds]
    # The limits of the integer type already clamp the same way.
    if int(ends[0]) == out.params.low and int(ends[1]) == out.params.high:
        return value
    low, high = (editor.constant(f"{value.name}/{w}", end) for w, end in zip(("low", "high"), ends, strict=True))
    dtype = out.params.dtype
    return editor.node("Clip", [value, low, high], f"{value.name}/clip", before=out.quantize, like=value, dtype=dtype)


def has_constant_clamp(out: Out) -> bool:
    """Return whether the clamp before the QuantizeLinear has constant bounds. Also return True if there is no clamp."""
    return out.clamp is None or clamp_bounds(out.clamp) is not None
