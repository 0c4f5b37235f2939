"""The integers that a float operator between DequantizeLinear and QuantizeLinear reads and gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor
from edgeq.graph.operators import channel_axis
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import clamp_bounds, is_op, node_input, only_reader
from edgeq.retarget.params import params_of, type_name


@dataclass(frozen=True, eq=False)
class In:
    """An input that a DequantizeLinear gives: its integers and what they mean."""

    value: ir.Value
    params: QuantParams


@dataclass(frozen=True, eq=False)
class Out:
    """What becomes of an operator's output: the QuantizeLinear behind it, and the clamp between, if any."""

    quantize: ir.Node
    params: QuantParams
    clamp: ir.Node | None


Sides = tuple[list[In], Out]
"""Of an operator."""


def _input(node: ir.Node, place: int) -> In | None:
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or not is_op(maker, "DequantizeLinear"):
        return None
    params, source = params_of(maker), maker.inputs[0]
    return In(source, params) if params is not None and source is not None else None


def _output(node: ir.Node) -> Out | None:
    user, clamp = only_reader(node.outputs[0]), None
    if is_op(user, "Relu", "Clip"):
        clamp = user
        assert clamp is not None
        user = only_reader(clamp.outputs[0])
    if user is None or not is_op(user, "QuantizeLinear"):
        return None
    params = params_of(user)
    return Out(user, params, clamp) if params is not None and not params.per_channel else None


def sides(node: ir.Node, places: tuple[int, ...]) -> Sides | str:
    """Inputs and output of an operator, or the reason why it has no integer form as it stands."""
    inputs = [_input(node, place) for place in places]
    out = _output(node)
    found = [i for i in inputs if i is not None]
    if len(found) < len(inputs):
        return "an input is not quantized"
    if out is None:
        return "its output is not quantized, or read by others before it is"
    if not constant_clamp(out):
        return "the bounds of its Clip are not constant"
    if found[0].params.dtype != out.params.dtype:
        return f"it reads {type_name(found[0].params.dtype)} and gives {type_name(out.params.dtype)}"
    if found[0].params.per_channel:
        return "its input has a scale per channel"
    return found, out


def products(node: ir.Node) -> Sides | str:
    """`sides` of a Conv, MatMul or Gemm."""
    found = sides(node, (0, 1))
    if isinstance(found, str):
        return found
    weight = found[0][1]
    if weight.params.block:
        return "its weight has a scale for each block"
    if weight.params.per_channel:
        rank = len(weight.value.shape) if weight.value.shape is not None else None
        if rank is None or weight.params.axis % rank != channel_axis(node) % rank:
            return "its weight has a scale for each input channel"
        if node.op_type == "MatMul" and rank != 2:
            return "its weight has a scale per channel and is no matrix"
    if [side.params.dtype for side in found[0]] == [ir.DataType.INT8, ir.DataType.UINT8]:
        return "int8 activations with uint8 weights have no kernel"
    return found


def clamped(value: ir.Value, out: Out, editor: Editor) -> ir.Value:
    """Integers clamped as the Relu or Clip in front of the QuantizeLinear does."""
    bounds = clamp_bounds(out.clamp) if out.clamp is not None else None
    if bounds is None:
        return value
    ends = [out.params.quantize(np.asarray(bound, np.float32)) for bound in bounds]
    if int(ends[0]) == out.params.low and int(ends[1]) == out.params.high:  # the type's own limits do it
        return value
    low, high = (editor.constant(f"{value.name}/{w}", end) for w, end in zip(("low", "high"), ends, strict=True))
    dtype = out.params.dtype
    return editor.node("Clip", [value, low, high], f"{value.name}/clip", before=out.quantize, like=value, dtype=dtype)


def constant_clamp(out: Out) -> bool:
    """Whether the bounds of the clamp in front of the QuantizeLinear are known, or there is none."""
    return out.clamp is None or clamp_bounds(out.clamp) is not None
