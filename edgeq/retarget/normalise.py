"""One form for the quantized models of all exporters, without changing a number.

PyTorch writes float weights with QuantizeLinear and DequantizeLinear behind them; others leave out zero points, or put
a Transpose behind a dequantized weight. Kernels want integers in the file, right before the operator.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.retarget.graph import Builder, constant_of, is_op, only_user, params_of, replace


def normalise(model: ir.Model) -> list[str]:
    """Rewrite in place; gives what was done, in words."""
    builder = Builder(model)
    explicit = sum(_explicit_zero_point(node, builder) for node in list(model.graph))
    stored = sum(_store_weight(node, builder) for node in list(model.graph))
    turned = sum(_turn_weight(node, builder) for node in list(model.graph))
    done = []
    if explicit:
        done.append(f"{explicit} zero points written out that were left to the default")
    if stored:
        done.append(f"{stored} weights stored as integers, which were quantized at load")
    if turned:
        done.append(f"{turned} weights stored transposed, which were transposed when run")
    return done


def _explicit_zero_point(node: ir.Node, builder: Builder) -> bool:
    if not is_op(node, "QuantizeLinear", "DequantizeLinear"):
        return False
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return False
    scale = constant_of(node.inputs[1])
    source = node.outputs[0] if node.op_type == "QuantizeLinear" else node.inputs[0]
    kind = source.dtype if source is not None and source.dtype is not None else ir.DataType.UINT8
    if scale is None or kind not in (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT32):
        return False
    if "output_dtype" in node.attributes:
        kind = ir.DataType(node.attributes.get_int("output_dtype", int(kind))) or kind
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(
        2, builder.constant(f"{node.outputs[0].name}/zero_point", np.zeros(scale.shape, kind.numpy()))
    )
    return True


def _store_weight(node: ir.Node, builder: Builder) -> bool:
    """QuantizeLinear of a constant: the integers themselves."""
    values = constant_of(node.inputs[0]) if is_op(node, "QuantizeLinear") else None
    params = params_of(node) if values is not None else None
    if values is None or params is None or node.outputs[0].is_graph_output():
        return False
    source = node.inputs[0]
    assert source is not None
    replace(node.outputs[0], builder.constant(f"{source.name}/{params.dtype}", params.quantize(values)))
    builder.graph.remove(node, safe=True)
    return True


def _turn_weight(node: ir.Node, builder: Builder) -> bool:
    """Transpose of a dequantized constant: dequantized, of the transposed constant."""
    dequantize = node.inputs[0].producer() if is_op(node, "Transpose") and node.inputs[0] is not None else None
    if dequantize is None or not is_op(dequantize, "DequantizeLinear") or node.outputs[0].is_graph_output():
        return False
    values, params = constant_of(dequantize.inputs[0]), params_of(dequantize)
    if values is None or params is None or only_user(dequantize.outputs[0]) is not node:
        return False
    order = list(node.attributes.get_ints("perm", list(reversed(range(values.ndim)))))
    source = dequantize.inputs[0]
    assert source is not None
    turned = builder.constant(f"{source.name}/transposed", values.transpose(order))
    if not params.scalar:
        dequantize.attributes["axis"] = ir.AttrInt64("axis", order.index(params.axis % values.ndim))
    dequantize.replace_input_with(0, turned)
    dequantize.outputs[0].shape = turned.shape
    replace(node.outputs[0], dequantize.outputs[0])
    builder.graph.remove(node, safe=True)
    return True
