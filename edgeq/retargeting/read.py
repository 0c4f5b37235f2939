"""Read a quantized model: its format, its integer types, and whether its scales make sense.

`normalise` gives the models of all exporters the same form, without changing a number. PyTorch writes float weights
followed by QuantizeLinear and DequantizeLinear. Other exporters leave out zero points, or put a Transpose after a
dequantized weight. Kernels need a weight that is stored as integers and followed only by its DequantizeLinear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from edgeq.errors import ModelError
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
    operator_of,
)
from edgeq.model.quant_params import QuantParams
from edgeq.retargeting.shift import float32_params_of, is_weight, pair_behind, params_at, params_of, type_name
from edgeq.util.records import computed

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


class QuantizedInput(NamedTuple):
    """Describe an input through which a node reads 8-bit integers: its tensor, its parameters, and whether it is a
    weight.
    """

    tensor: str
    params: QuantParams
    weight: bool


def places(node: ir.Node) -> Iterator[QuantizedInput]:
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
        problem = _problem(node) if is_op(node, "QuantizeLinear", "DequantizeLinear") else ""
        if problem:
            raise ModelError(f"{path}: {node.op_type} {node.name!r} {problem}", "Export the model again")


def _problem(node: ir.Node) -> str:
    """Return the fault in the scales of a Q or DQ node, or "" if there is none."""
    scale, params, source = constant(node.inputs[1]), params_of(node), node.inputs[0]
    if scale is not None and not np.isfinite(scale).all():
        return "has a scale that is not finite"
    if scale is not None and (scale <= 0).any():
        return f"has the scale {scale.min():g}; scales are above 0"
    if params is not None and params.zero_point.size not in (1, params.scale.size):
        return f"has {params.scale.size} scales and {params.zero_point.size} zero points"
    shape = source.shape if source is not None else None
    if params is None or not params.per_channel or params.block or shape is None:
        return ""
    if not -len(shape) <= params.axis < len(shape):
        return f"has the axis {params.axis}, but its tensor has {len(shape)} dimensions"
    size = shape[params.axis]
    if isinstance(size, int) and size != params.scale.size:
        return f"has {params.scale.size} scales along an axis of {size}"
    return ""


# The outputs of these operators are values of their input, or zero. Quantizing such an output with the input's scale
# changes nothing.
_KEEPING = DATA_MOVEMENT - {"Pad", "Resize", "Split"} | {"Relu"}
_GAINING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "AveragePool", "GlobalAveragePool"})


def normalise(model: ir.Model) -> list[str]:
    """Rewrite the model in place, and return one phrase for each kind of change."""
    editor = Editor(model)
    changes = []
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
    if params is None or params.per_channel or not gains or inside or len(node.outputs) != 1:
        return False
    if output.is_graph_output() or any(is_op(u, "QuantizeLinear") for u in users):
        return False
    pair_behind(output, params, editor)
    return True
