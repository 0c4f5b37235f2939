"""QDQ to QOperator: a float operator between DequantizeLinear and QuantizeLinear becomes the integer operator.

What has no integer form, or stands between tensors that are not all quantized, stays as it is. A Relu or Clip in front
of the QuantizeLinear disappears where the scale does its work, else it becomes a Clip of the integers: quantizing and
clamping can change places, because quantizing keeps the order of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.movers import MOVERS
from edgeq.retarget.graph import (
    INTEGERS,
    LIMITS,
    MAIN,
    MICROSOFT,
    Builder,
    Params,
    constant_of,
    is_op,
    only_user,
    params_of,
    replace,
)


@dataclass(frozen=True, eq=False)
class _In:
    """An input that a DequantizeLinear gives: its integers and what they mean."""

    value: ir.Value
    params: Params


@dataclass(frozen=True, eq=False)
class _Out:
    """What becomes of an operator's output: the QuantizeLinear behind it, and the clamp between, if any."""

    quantize: ir.Node
    params: Params
    clamp: ir.Node | None


def to_qoperator(model: ir.Model, wanted: Callable[[ir.Node], bool] = lambda node: True) -> tuple[int, list[str]]:
    """Rewrite in place; gives how many operators were, and the operators with weights that were not and why.

    Args:
        wanted: which operators to rewrite.
    """
    builder = Builder(model)
    _share_quantizers(builder)
    count, kept = 0, []
    for node in list(model.graph):
        rule = _RULES.get(node.op_type) if node.domain in MAIN else None
        if rule is None:
            rule = _mover if node.domain in MAIN and node.op_type in MOVERS else None
        if rule is None or node.graph is None or not wanted(node):
            continue
        reason = rule(node, builder)
        if not reason:
            count += 1
        elif node.op_type in ("Conv", "Gemm", "MatMul"):
            kept.append(f"{node.op_type} {node.name} stays between Q and DQ: {reason}")
    return count, kept


def _share_quantizers(builder: Builder) -> None:
    """One QuantizeLinear where a tensor has several that say the same."""
    for node in list(builder.graph):
        for output in node.outputs:
            first: list[tuple[ir.Node, Params]] = []
            for user, _ in list(output.uses()):
                params = params_of(user) if is_op(user, "QuantizeLinear") else None
                if params is None or user.graph is not builder.graph:
                    continue
                twin = next((n for n, p in first if p.same(params)), None)
                if twin is None:
                    first.append((user, params))
                elif not user.outputs[0].is_graph_output():
                    # The twin may stand later in the list; the graph is sorted in the end.
                    replace(user.outputs[0], twin.outputs[0])
                    builder.graph.remove(user, safe=True)


def _input(node: ir.Node, place: int) -> _In | None:
    value = node.inputs[place] if len(node.inputs) > place else None
    maker = value.producer() if value is not None else None
    if maker is None or not is_op(maker, "DequantizeLinear"):
        return None
    params, source = params_of(maker), maker.inputs[0]
    return _In(source, params) if params is not None and source is not None else None


def _output(node: ir.Node) -> _Out | None:
    user, clamp = only_user(node.outputs[0]), None
    if is_op(user, "Relu", "Clip"):
        clamp = user
        assert clamp is not None
        user = only_user(clamp.outputs[0])
    if user is None or not is_op(user, "QuantizeLinear"):
        return None
    params = params_of(user)
    return _Out(user, params, clamp) if params is not None and params.scalar else None


def _emit(
    op_type: str,
    inputs: list[ir.Value | None],
    node: ir.Node,
    out: _Out,
    builder: Builder,
    *,
    domain: str = "",
    attributes: dict[str, ir.Attr] | None = None,
) -> str:
    """Put the integer operator in place of node, clamp and QuantizeLinear."""
    kind = INTEGERS[out.params.dtype]
    result = builder.node(
        op_type,
        inputs,
        f"{node.name or node.op_type}_quant",
        before=out.quantize,
        like=node.outputs[0],
        dtype=kind,
        attributes=dict(node.attributes) if attributes is None else attributes,
        domain=domain,
    )
    replace(out.quantize.outputs[0], _clamped(result, out, builder))
    for gone in (out.quantize, out.clamp, node):
        if gone is not None:
            builder.graph.remove(gone, safe=True)
    return ""


def _clamped(value: ir.Value, out: _Out, builder: Builder) -> ir.Value:
    """Integers clamped as the Relu or Clip in front of the QuantizeLinear does."""
    bounds = _clamp_bounds(out)
    if bounds is None:
        return value
    low, high = (builder.constant(f"{value.name}/{w}", b) for w, b in zip(("low", "high"), bounds, strict=True))
    kind = INTEGERS[out.params.dtype]
    return builder.node("Clip", [value, low, high], f"{value.name}/clip", before=out.quantize, like=value, dtype=kind)


def _clamp_bounds(out: _Out) -> tuple[NDArray[np.generic], NDArray[np.generic]] | None:
    """Integers to clamp to; None where the type's own limits do it."""
    if out.clamp is None:
        return None
    low, high = _clamp_limits(out.clamp)
    ends = [out.params.quantize(np.array(bound, np.float32)) for bound in (low, high)]
    least, most = LIMITS[out.params.dtype]
    if int(ends[0]) == least and int(ends[1]) == most:
        return None
    return ends[0], ends[1]


def _clamp_limits(clamp: ir.Node) -> tuple[float, float]:
    if clamp.op_type == "Relu":
        return 0.0, float(np.finfo(np.float32).max)
    limits = [float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)]
    for place, value in enumerate(clamp.inputs[1:3]):
        constant = constant_of(value)
        if constant is not None:
            limits[place] = float(constant.reshape(-1)[0])
    return limits[0], limits[1]


def _constant_clamp(out: _Out) -> bool:
    return out.clamp is None or all(v is None or constant_of(v) is not None for v in out.clamp.inputs[1:3])


def _sides(node: ir.Node, places: tuple[int, ...]) -> tuple[list[_In], _Out] | str:
    """Inputs and output of an operator, or the reason why it has no integer form as it stands."""
    inputs = [_input(node, place) for place in places]
    out = _output(node)
    found = [i for i in inputs if i is not None]
    if len(found) < len(inputs):
        return "an input is not quantized"
    if out is None:
        return "its output is not quantized, or read by others before it is"
    if not _constant_clamp(out):
        return "the bounds of its Clip are not constant"
    if found[0].params.dtype != out.params.dtype:
        return f"it reads {found[0].params.dtype} and gives {out.params.dtype}"
    if not found[0].params.scalar:
        return "its input has a scale per channel"
    return found, out


def _triple(side: _In, name: str, builder: Builder) -> list[ir.Value | None]:
    return [side.value, *builder.parameters(side.params, name)]


def _conv(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, (0, 1))
    if isinstance(found, str):
        return found
    sides, out = found
    if _bad_pair(sides):
        return _bad_pair(sides)
    bias, reason = _bias(node, sides, builder)
    if reason:
        return reason
    x, w = (_triple(s, f"{node.name}/{w}", builder) for s, w in zip(sides, "xw", strict=True))
    y = builder.parameters(out.params, f"{node.name}/y")
    return _emit("QLinearConv", [*x, *w, *y, *([bias] if bias is not None else [])], node, out, builder)


def _matmul(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, (0, 1))
    if isinstance(found, str):
        return found
    sides, out = found
    if _bad_pair(sides):
        return _bad_pair(sides)
    a, b = (_triple(s, f"{node.name}/{w}", builder) for s, w in zip(sides, "ab", strict=True))
    return _emit("QLinearMatMul", [*a, *b, *builder.parameters(out.params, f"{node.name}/y")], node, out, builder)


def _gemm(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, (0, 1))
    if isinstance(found, str):
        return found
    sides, out = found
    if _bad_pair(sides):
        return _bad_pair(sides)
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    if beta != 1.0:
        return "beta is not 1"
    bias, reason = _bias(node, sides, builder, factor=alpha)
    if reason:
        return reason
    a, b = (_triple(s, f"{node.name}/{w}", builder) for s, w in zip(sides, "ab", strict=True))
    inputs = [*a, *b, bias, *builder.parameters(out.params, f"{node.name}/y")]
    attributes = {name: value for name, value in node.attributes.items() if name != "beta"}
    return _emit("QGemm", inputs, node, out, builder, domain=MICROSOFT, attributes=attributes)


def _binary(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, (0, 1))
    if isinstance(found, str):
        return found
    sides, out = found
    if sides[0].params.dtype != sides[1].params.dtype or not sides[1].params.scalar:
        return "its inputs are of different types"
    a, b = (_triple(s, f"{node.name}/{w}", builder) for s, w in zip(sides, "ab", strict=True))
    inputs = [*a, *b, *builder.parameters(out.params, f"{node.name}/y")]
    return _emit(f"QLinear{node.op_type}", inputs, node, out, builder, domain=MICROSOFT)


def _unary(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, (0,))
    if isinstance(found, str):
        return found
    sides, out = found
    if node.op_type == "AveragePool" and (
        node.attributes.get_int("ceil_mode", 0) != 0 or any(d != 1 for d in node.attributes.get_ints("dilations", []))
    ):
        return "it has ceil_mode or dilations"
    inputs = [*_triple(sides[0], f"{node.name}/x", builder), *builder.parameters(out.params, f"{node.name}/y")]
    return _emit(f"QLinear{node.op_type}", inputs, node, out, builder, domain=MICROSOFT)


def _concat(node: ir.Node, builder: Builder) -> str:
    found = _sides(node, tuple(range(len(node.inputs))))
    if isinstance(found, str):
        return found
    sides, out = found
    if any(s.params.dtype != out.params.dtype or not s.params.scalar for s in sides):
        return "its inputs are of different types"
    inputs: list[ir.Value | None] = [*builder.parameters(out.params, f"{node.name}/y")]
    for place, side in enumerate(sides):
        inputs += _triple(side, f"{node.name}/x{place}", builder)
    return _emit("QLinearConcat", inputs, node, out, builder, domain=MICROSOFT)


def _mover(node: ir.Node, builder: Builder) -> str:
    """An operator that only moves numbers moves integers: same parameters in front and behind."""
    if node.op_type in ("Pad", "Expand", "Tile", "Split") or len(node.outputs) != 1:
        return "no integer form"
    if node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") != "nearest":
        return "it computes new numbers"
    found = _sides(node, (0,))
    if isinstance(found, str):
        return found
    sides, out = found
    if out.clamp is not None or not sides[0].params.same(out.params):
        return "its scale changes"
    return _emit(node.op_type, [sides[0].value, *node.inputs[1:]], node, out, builder)


def _clamp(node: ir.Node, builder: Builder) -> str:
    """A Relu or Clip of its own, with one scale in front and behind: a Clip of the integers."""
    found = _sides(node, (0,))
    if isinstance(found, str):
        return found
    sides, out = found
    alone = _Out(out.quantize, out.params, node)
    if out.clamp is not None or not sides[0].params.same(out.params) or not _constant_clamp(alone):
        return "its scale or a bound changes"
    replace(out.quantize.outputs[0], _clamped(sides[0].value, alone, builder))
    builder.graph.remove([out.quantize, node], safe=True)
    return ""


def _bad_pair(sides: list[_In]) -> str:
    if sides[0].params.dtype == "int8" and sides[1].params.dtype == "uint8":
        return "int8 activations with uint8 weights have no kernel"
    return ""


def _bias(node: ir.Node, sides: list[_In], builder: Builder, *, factor: float = 1.0) -> tuple[ir.Value | None, str]:
    """The bias as int32 in units of input scale times weight scale."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if value is None:
        return None, ""
    numbers = constant_of(value)
    if numbers is None:
        maker = value.producer()
        params = params_of(maker) if maker is not None and is_op(maker, "DequantizeLinear") else None
        integers = constant_of(maker.inputs[0]) if maker is not None and params is not None else None
        if params is None or integers is None:
            return None, "its bias is not constant"
        scale, zero = params.spread(integers.ndim)
        numbers = (integers.astype(np.int64) - zero.astype(np.int64)).astype(np.float64) * scale
    unit = sides[0].params.scale.reshape(-1)[:1].astype(np.float64) * sides[1].params.scale.reshape(-1) * factor
    levels = np.rint(numbers.astype(np.float64) / unit)
    limits = np.iinfo(np.int32)
    if np.any(np.abs(levels) > limits.max):
        return None, "its bias does not fit into int32"
    return builder.constant(f"{value.name}/int32", levels.astype(np.int32)), ""


_RULES: dict[str, Callable[[ir.Node, Builder], str]] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _binary,
    "Mul": _binary,
    "Sigmoid": _unary,
    "LeakyRelu": _unary,
    "AveragePool": _unary,
    "GlobalAveragePool": _unary,
    "Concat": _concat,
    "Relu": _clamp,
    "Clip": _clamp,
}
