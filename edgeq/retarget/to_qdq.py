"""QOperator to QDQ: each integer operator becomes DequantizeLinear, the float operator and QuantizeLinear.

Nothing is lost: the integers, scales and zero points are those of the operator.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgeq.retarget.graph import MAIN, MICROSOFT, Builder, Params, constant_of, read_params, replace

Rule = Callable[[ir.Node, Builder], bool]


def to_qdq(model: ir.Model) -> tuple[int, list[str]]:
    """Rewrite in place; gives how many operators were, and those integer operators that have no float form here."""
    builder = Builder(model)
    count, kept = 0, []
    for node in list(model.graph):
        rule = _RULES.get(node.op_type) if node.domain in (*MAIN, MICROSOFT) else None
        if rule is not None and rule(node, builder):
            builder.graph.remove(node, safe=True)
            count += 1
        elif node.op_type.startswith("QLinear") or node.op_type == "QGemm":
            kept.append(f"{node.op_type} {node.name} stays as it is")
    return count, kept


def _float(node: ir.Node, place: int, builder: Builder, *, axis: int = 0) -> ir.Value | None:
    """The numbers that an operator's integer input (value, scale, zero point from `place` on) stands for."""
    value = node.inputs[place]
    params = read_params(node.inputs[place + 1], node.inputs[place + 2], axis)
    if value is None or params is None:
        return None
    return builder.dequantize(value, params, f"{value.name}/float", before=node)


def _finish(node: ir.Node, result: ir.Value, scale: int, builder: Builder) -> bool:
    params = read_params(node.inputs[scale], node.inputs[scale + 1], 0)
    assert params is not None
    replace(node.outputs[0], builder.quantize(result, params, f"{node.outputs[0].name}/integers", before=node))
    return True


def _known(node: ir.Node, *places: int) -> bool:
    """Whether scales and zero points at these places are constants."""
    return all(len(node.inputs) > p + 1 and read_params(node.inputs[p], node.inputs[p + 1], 0) for p in places)


def _conv(node: ir.Node, builder: Builder) -> bool:
    if not _known(node, 1, 4, 6):
        return False
    x, w = _float(node, 0, builder), _float(node, 3, builder)
    inputs = [x, w]
    if len(node.inputs) > 8 and node.inputs[8] is not None:
        inputs.append(_bias(node.inputs[8], node, 1, 4, builder))
    result = _operator("Conv", inputs, node, builder)
    return _finish(node, result, 6, builder)


def _matmul(node: ir.Node, builder: Builder) -> bool:
    if not _known(node, 1, 4, 6):
        return False
    axis = len(node.inputs[3].shape) - 1 if node.inputs[3] is not None and node.inputs[3].shape is not None else 1
    inputs = [_float(node, 0, builder), _float(node, 3, builder, axis=axis)]
    return _finish(node, _operator("MatMul", inputs, node, builder), 6, builder)


def _gemm(node: ir.Node, builder: Builder) -> bool:
    ends_in_float = len(node.inputs) < 9 or node.inputs[7] is None
    if not _known(node, 1, 4) or not (ends_in_float or _known(node, 7)):
        return False
    axis = 0 if node.attributes.get_int("transB", 0) else 1
    inputs = [_float(node, 0, builder), _float(node, 3, builder, axis=axis)]
    alpha = node.attributes.get_float("alpha", 1.0)
    if len(node.inputs) > 6 and node.inputs[6] is not None:
        inputs.append(_bias(node.inputs[6], node, 1, 4, builder, factor=alpha))
    result = _operator("Gemm", inputs, node, builder)
    if ends_in_float:
        replace(node.outputs[0], result)
        return True
    return _finish(node, result, 7, builder)


def _binary(op_type: str) -> Rule:
    def rule(node: ir.Node, builder: Builder) -> bool:
        if not _known(node, 1, 4, 6):
            return False
        inputs = [_float(node, 0, builder), _float(node, 3, builder)]
        return _finish(node, _operator(op_type, inputs, node, builder), 6, builder)

    return rule


def _unary(op_type: str, *without: str) -> Rule:
    def rule(node: ir.Node, builder: Builder) -> bool:
        if not _known(node, 1, 3) or node.attributes.get_int("channels_last", 0) != 0:
            return False
        result = _operator(op_type, [_float(node, 0, builder)], node, builder, without=("channels_last", *without))
        return _finish(node, result, 3, builder)

    return rule


def _concat(node: ir.Node, builder: Builder) -> bool:
    places = range(2, len(node.inputs), 3)
    if not _known(node, 0, *(p + 1 for p in places)):
        return False
    inputs = [_float(node, place, builder) for place in places]
    return _finish(node, _operator("Concat", inputs, node, builder), 0, builder)


def _operator(
    op_type: str, inputs: list[ir.Value | None], node: ir.Node, builder: Builder, *, without: tuple[str, ...] = ()
) -> ir.Value:
    name = (node.name or op_type).removesuffix("_quant")
    return builder.node(
        op_type,
        inputs,
        f"{name}/float",
        before=node,
        like=node.outputs[0],
        dtype=ir.DataType.FLOAT,
        attributes={key: value for key, value in node.attributes.items() if key not in without},
    )


def _bias(value: ir.Value | None, node: ir.Node, x: int, w: int, builder: Builder, *, factor: float = 1.0) -> ir.Value:
    """An int32 bias in units of input scale times weight scale, as a float."""
    assert value is not None
    scales = [constant_of(node.inputs[place]) for place in (x, w)]
    assert scales[0] is not None
    assert scales[1] is not None
    scale = (scales[0].reshape(-1)[:1] * scales[1] * np.float32(factor)).astype(np.float32)
    scale = scale.reshape(()) if scale.size == 1 else scale.reshape(-1)
    params = Params(scale, np.zeros(scale.shape, np.int32), 0)
    return builder.dequantize(value, params, f"{value.name}/float", before=node)


_RULES: dict[str, Rule] = {
    "QLinearConv": _conv,
    "QLinearMatMul": _matmul,
    "QGemm": _gemm,
    "QLinearAdd": _binary("Add"),
    "QLinearMul": _binary("Mul"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearLeakyRelu": _unary("LeakyRelu"),
    "QLinearSoftmax": _unary("Softmax", "opset"),
    "QLinearAveragePool": _unary("AveragePool"),
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearConcat": _concat,
}
