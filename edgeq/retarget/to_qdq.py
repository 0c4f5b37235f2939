"""QOperator to QDQ: each integer operator becomes DequantizeLinear, the float operator and QuantizeLinear.

Nothing is lost: the integers, scales and zero points are those of the operator.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import Editor, replace_value
from edgeq.graph.operators import IntegerInput, channel_axis, integer_inputs, operator_of
from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import MAIN_DOMAINS, MICROSOFT, node_input
from edgeq.model.opset import LOWEST
from edgeq.retarget.params import params_at
from edgeq.retarget.read import is_integer_operator

# Their float forms have other inputs or attributes.
_OTHERWISE = frozenset({"QLinearReduceMean", "QLinearWhere"})
# Attributes that no float form has.
_OWN_ATTRIBUTES = frozenset({"channels_last", "opset"})


def to_qdq(model: ir.Model) -> list[str]:
    """Rewrite in place; gives those integer operators that have no float form here."""
    editor, kept = Editor(model), []
    for node in list(model.graph):
        if not is_integer_operator(node):
            continue
        if _rewrite(node, editor):
            editor.graph.remove(node, safe=True)
        else:
            kept.append(f"{node.op_type} {node.name} stays as it is")
    return kept


def _rewrite(node: ir.Node, editor: Editor) -> bool:
    """Put the float form of an integer operator between Q and DQ; gives whether there is one."""
    row, output = operator_of(node), node.outputs[0]
    if row.integer_output is None or node.op_type in _OTHERWISE or node.domain not in (*MAIN_DOMAINS, MICROSOFT):
        return False
    if node.attributes.get_int("channels_last", 0) != 0 or _flattens(node):
        return False
    gives_floats = node.op_type == "QGemm" and node_input(node, row.integer_output[0]) is None
    given = [(node_input(node, places.value), _operand(node, places)) for places in integer_inputs(node)]
    known = [(value, params) for value, params in given if value is not None and params is not None]
    made = params_at(node, row.integer_output[0])
    if len(known) < len(given) or (made is None and not gives_floats):
        return False
    if any(params.scale.ndim > 1 for _, params in known):
        return False
    bias = node_input(node, row.bias)
    if bias is not None:
        params = _bias(node, bias, known[0][1], known[1][1])
        if params is None:
            return False
        known.append((bias, params))
    result = editor.node(
        row.float_form,
        [editor.dequantize(value, params, f"{value.name}/float", before=node) for value, params in known],
        f"{(node.name or row.float_form).removesuffix('_quant')}/float",
        before=node,
        like=output,
        dtype=ir.DataType.FLOAT,
        attributes={key: value for key, value in node.attributes.items() if key not in _OWN_ATTRIBUTES},
    )
    if made is not None:
        result = editor.quantize(result, made, f"{output.name}/integers", before=node)
    replace_value(output, result)
    return True


def _operand(node: ir.Node, places: IntegerInput) -> QuantParams | None:
    assert places.scale is not None, "only operators that give integer sums have no scale"
    if places.value not in operator_of(node).weights:
        return params_at(node, places.scale)
    value, axis = node_input(node, places.value), channel_axis(node)
    rank = len(value.shape) if value is not None and value.shape is not None else 2
    return params_at(node, places.scale, axis % rank)


def _flattens(node: ir.Node) -> bool:
    """Whether it is a Softmax as opset 12 and older have it, over the last axes together."""
    if node.op_type != "QLinearSoftmax" or node.attributes.get_int("opset", LOWEST) >= LOWEST:
        return False
    axis, data = node.attributes.get_int("axis", -1), node.inputs[0]
    return axis != -1 and (data is None or data.shape is None or axis != len(data.shape) - 1)


def _bias(node: ir.Node, bias: ir.Value, data: QuantParams, weight: QuantParams) -> QuantParams | None:
    """Of an int32 bias, which is in units of input scale times weight scale; None where it has one integer for several
    output channels, whose units differ."""
    factor = np.float32(node.attributes.get_float("alpha", 1.0))
    scale = (data.scale.reshape(-1)[:1] * weight.scale * factor).astype(np.float32).reshape(-1)
    shape = bias.shape if bias.shape is not None else scale.shape
    if scale.size > 1 and (not len(shape) or shape[-1] != scale.size):
        return None
    return QuantParams(scale, np.zeros((), np.int64), ir.DataType.INT32, axis=max(len(shape) - 1, 0))
