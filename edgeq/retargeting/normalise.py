"""Give the models of all exporters the same form, without changing a number.

PyTorch writes float weights followed by QuantizeLinear and DequantizeLinear. Other exporters leave out zero points, or
put a Transpose after a dequantized weight. Kernels need a weight that is stored as integers and followed only by its
DequantizeLinear.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.model.edit import Editor, replace_value
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    constant,
    is_constant,
    is_op,
    name_of,
    node_input,
    only_reader,
)
from edgeq.retargeting.shift import float32_params_of, pair_behind, params_of, type_name

# The outputs of these operators are values of their input, or zero. Quantizing such an output with the input's scale
# changes nothing.
_KEEPING = DATA_MOVEMENT - {"Pad", "Resize", "Split"} | {"Relu"}
_GAINING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "AveragePool", "GlobalAveragePool"})


def normalise(model: ir.Model) -> list[str]:
    """Rewrite the model in place, and return one phrase for each kind of change."""
    editor = Editor(model)
    changes = []
    # In this order: weights are stored with explicit zero points, and transposed once they are stored.
    for change, description in (
        (_explicit_zero_point, "zero points written explicitly that were the default"),
        (_write_plainly, ""),
        (_store_weight, "weights stored as integers that were quantized at load"),
        (_turn_weight, "weights stored transposed that were transposed at run time"),
        (_carry_on, "outputs quantized that are already multiples of their scale, such as those of a Relu"),
    ):
        count = sum(change(node, editor) for node in list(model.graph))
        if count and description:
            changes.append(f"{count} {description}")
    return changes


def _write_plainly(node: ir.Node, editor: Editor) -> bool:
    """Replace two forms that ONNX Runtime's optimiser handles wrongly with equivalent forms.

    A scale that is a list with one element becomes a scalar. The attribute that states the integer type is removed if
    there is a zero point.
    """
    if not is_op(node, "QuantizeLinear", "DequantizeLinear"):
        return False
    for place in (1, 2) if "block_size" not in node.attributes else ():
        value = node_input(node, place)
        values = constant(value)
        if value is not None and values is not None and values.shape == (1,):
            node.replace_input_with(place, editor.constant(f"{value.name}/scalar", values.reshape(())))
    zero = node_input(node, 2)
    if node.op_type == "QuantizeLinear" and zero is not None:
        node.attributes.pop("output_dtype", None)
        # onnx does not know the types of nodes in the domain com.microsoft
        node.outputs[0].type = node.outputs[0].type or zero.type
    return True


def _explicit_zero_point(node: ir.Node, editor: Editor) -> bool:
    if not is_op(node, "QuantizeLinear", "DequantizeLinear") or node_input(node, 2) is not None:
        return False
    scale = constant(node.inputs[1])
    kind = node.inputs[0].dtype if node.inputs[0] is not None else None
    if node.op_type == "QuantizeLinear":
        kind = ir.DataType(node.attributes.get_int("output_dtype", 0)) or ir.DataType.UINT8
    if scale is None or kind not in (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT32):
        return False
    editor.set_input(node, 2, np.zeros(scale.shape, kind.numpy()), f"{node.outputs[0].name}/zero_point")
    return True


def _store_weight(node: ir.Node, editor: Editor) -> bool:
    """Replace the QuantizeLinear of a constant with the resulting integers."""
    values = constant(node.inputs[0]) if is_op(node, "QuantizeLinear") else None
    params = params_of(node) if values is not None else None
    if values is None or params is None or node.outputs[0].is_graph_output():
        return False
    name = f"{name_of(node.inputs[0])}/{type_name(params.dtype)}"
    replace_value(node.outputs[0], editor.constant(name, params.quantize(values)))
    editor.graph.remove(node, safe=True)
    return True


def _turn_weight(node: ir.Node, editor: Editor) -> bool:
    """Transpose a constant and dequantize the result, instead of dequantizing it first and transposing it in a node."""
    dequantize = node.inputs[0].producer() if is_op(node, "Transpose") and node.inputs[0] is not None else None
    if dequantize is None or not is_op(dequantize, "DequantizeLinear") or node.outputs[0].is_graph_output():
        return False
    values, params = constant(dequantize.inputs[0]), params_of(dequantize)
    if values is None or params is None or params.block or only_reader(dequantize.outputs[0]) is not node:
        return False
    order = list(node.attributes.get_ints("perm", list(reversed(range(values.ndim)))))
    turned = editor.constant(f"{name_of(dequantize.inputs[0])}/transposed", values.transpose(order))
    if params.per_channel:
        # The axis of the scales moves with the dimensions.
        dequantize.attributes["axis"] = ir.AttrInt64("axis", order.index(params.axis % values.ndim))
    dequantize.replace_input_with(0, turned)
    dequantize.outputs[0].shape = turned.shape if dequantize.outputs[0].type is not None else None
    replace_value(node.outputs[0], dequantize.outputs[0])
    editor.graph.remove(node, safe=True)
    return True


def _carry_on(node: ir.Node, editor: Editor) -> bool:
    """In DequantizeLinear → Relu → Conv, insert a Q/DQ pair with the scale of the DequantizeLinear between Relu and
    Conv, so that the Conv can run on integers. The same applies to the other operators in `_KEEPING`.
    """
    source = node.inputs[0] if node.domain in MAIN_DOMAINS and node.op_type in _KEEPING and node.inputs else None
    maker = source.producer() if source is not None else None
    if maker is None or not is_op(maker, "DequantizeLinear") or is_constant(maker.inputs[0]):
        return False
    output, params = node.outputs[0], float32_params_of(maker)
    users = [use.node for use in output.uses()]
    gains = any(u.domain in MAIN_DOMAINS and u.op_type in _GAINING | _KEEPING for u in users)
    inside = any(u.graph is not editor.graph for u in users)
    # A pair costs time, which only an operator with a faster integer form earns back.
    if params is None or params.per_channel or not gains or inside or len(node.outputs) != 1:
        return False
    if output.is_graph_output() or any(is_op(u, "QuantizeLinear") for u in users):
        return False
    pair_behind(output, params, editor)
    return True
