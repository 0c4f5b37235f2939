"""What a file for onnxruntime-riscv may hold, checked before it is written."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError
from edgeq.graph.operators import operator_of
from edgeq.graph.query import (
    MAIN_DOMAINS,
    MICROSOFT,
    attributes,
    bodies,
    constant,
    constant_tensor,
    node_input,
    only_reader,
)

OPSET = 13
IR_VERSION = 7
_RELU = "QLinearRelu"
_FUSES_RELU = ("QLinearConv", "QLinearAdd")
_MICROSOFT = frozenset({"QLinearAdd"})
_AXES_TO_ATTRIBUTE = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"}
)


def check_dialect(model: ir.Model) -> None:
    """Refuse what the runtime would: a wrong version or domain, an unknown operator, a QLinearRelu that does not fuse,
    scales that are no scalars, zero points other than 0.

    Raises:
        ModelError: names the node and the rule.
    """
    if model.ir_version > IR_VERSION:
        raise ModelError(f"the file has format version {model.ir_version}; the runtime reads up to {IR_VERSION}")
    opsets = dict(model.opset_imports)
    if opsets.get("") not in (12, 13) or opsets.get(MICROSOFT) != 1:
        raise ModelError(f"the file imports {opsets}; the runtime needs opset 12 or 13, and {MICROSOFT} 1")
    for node in model.graph:
        where = f"{node.op_type} {node.name!r}"
        if node.op_type == _RELU:
            maker = _maker(node)
            if maker is None or maker.op_type not in _FUSES_RELU or only_reader(maker.outputs[0]) is not node:
                raise ModelError(f"{where} fuses into nothing, and has no kernel of its own")
        elif node.domain == MICROSOFT:
            if node.op_type not in _MICROSOFT:
                raise ModelError(f"{where} is unknown to the runtime")
        elif node.domain or not onnx.defs.has(node.op_type, OPSET, ""):
            raise ModelError(f"{where} is not in opset {OPSET}")
        if node.op_type in (*_FUSES_RELU, "QuantizeLinear", "DequantizeLinear"):
            _check_params(node, where)
        if node.op_type == "MaxPool":
            _check_pool(node, where)


def to_oldest_form(node: ir.Node) -> None:
    """Write a node of a later opset as opset 13 has it, in place, and those in its bodies.

    Raises:
        ModelError: it has no such form.
    """
    where = f"{node.op_type} {node.name!r}"
    if node.domain not in MAIN_DOMAINS:
        raise ModelError(f"{where} of {node.domain} is unknown to the runtime")
    if node.op_type in _AXES_TO_ATTRIBUTE and len(node.inputs) > 1:
        axes = constant(node.inputs[1])
        if axes is None:
            raise ModelError(f"{where} computes its axes, which opset {OPSET} does not know")
        node.resize_inputs(1)
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.ravel().tolist())
        return
    if node.op_type == "HardSwish" or not onnx.defs.has(node.op_type, OPSET, ""):
        raise ModelError(f"{where} is not in opset {OPSET}")
    schema = onnx.defs.get_schema(node.op_type, OPSET, "")
    unknown = [attribute for name, attribute in node.attributes.items() if name not in schema.attributes]
    used = [attribute.name for attribute in unknown if not _is_default(attribute, node.op_type)]
    if used or len(node.inputs) > schema.max_input:
        raise ModelError(f"{f'{used[0]} of ' if used else ''}{where} is not in opset {OPSET}")
    for inner in (inner for body in bodies(node) for inner in body):
        to_oldest_form(inner)
    for attribute in unknown:
        del node.attributes[attribute.name]


def _is_default(attribute: ir.Attr, op_type: str) -> bool:
    """Whether an attribute that opset 13 does not know only states the behaviour of opset 13."""
    if attribute.name == "num_outputs":
        return True
    if attribute.name in ("allowzero", "saturate"):
        return attribute.value in (0, 1)
    # An attribute that a later version brought has what was done before for its default.
    newest = onnx.defs.get_schema(op_type, "").attributes.get(attribute.name)
    if newest is None or not newest.default_value.type:
        return False
    default = onnx.helper.get_attribute_value(newest.default_value)
    return bool(attribute.value == (default.decode() if isinstance(default, bytes) else default))


def _check_params(node: ir.Node, where: str) -> None:
    row = operator_of(node)
    places = [(integers.scale, integers.zero_point) for integers in row.integers]
    for scale_at, zero_at in [*places, *([row.integer_output] if row.integer_output else [])]:
        scale, zero = constant_tensor(node_input(node, scale_at)), constant_tensor(node_input(node, zero_at))
        if scale is None or scale.size != 1:
            raise ModelError(f"{where} has more than one scale; the kernels refuse that")
        if zero is None or zero.dtype != ir.DataType.INT8 or zero.numpy().any():
            raise ModelError(f"{where} has a zero point other than int8 0; the kernels refuse that")


def _check_pool(node: ir.Node, where: str) -> None:
    maker = behind = _maker(node)
    if maker is not None and maker.op_type == _RELU:
        behind = _maker(maker)
    if behind is None or behind.op_type != "QLinearConv":
        return
    a = attributes(node)
    kernel, strides, pads = a["kernel_shape"], a.get("strides", [1, 1]), a.get("pads", [0, 0, 0, 0])
    square = len(set(kernel)) == 1 and len(set(strides)) == 1 and len(set(pads)) == 1
    fits = max(*kernel, *strides, *pads) <= 3
    odd = a.get("ceil_mode") or "auto_pad" in a or any(d != 1 for d in a.get("dilations", [1]))
    if not square or not fits or odd or (pads[0] and maker is behind):
        raise ModelError(f"{where} behind a convolution would be fused, and wrongly")


def _maker(node: ir.Node) -> ir.Node | None:
    return node.inputs[0].producer() if node.inputs[0] is not None else None
