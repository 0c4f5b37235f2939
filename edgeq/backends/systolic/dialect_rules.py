"""What a file for onnxruntime-riscv may hold, checked before it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.errors import ModelError

OPSET = 13
IR_VERSION = 7
_RELU = "QLinearRelu"
_FUSES_RELU = ("QLinearConv", "QLinearAdd")
_MICROSOFT = frozenset({"QLinearAdd"})
# Operators that later opsets only made take more types, or an attribute that is not used here: same name, same meaning.
_WIDENED = frozenset(
    {
        "Add",
        "BatchNormalization",
        "Div",
        "Identity",
        "LeakyRelu",
        "Mul",
        "PRelu",
        "Pow",
        "Relu",
        "Reshape",
        "Shape",
        "Sub",
        "Where",
    }
)
_AXES_TO_ATTRIBUTE = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"}
)


def check_dialect(model: onnx.ModelProto) -> None:
    """Refuse what the runtime would: a wrong version or domain, an unknown operator, a QLinearRelu that does not fuse,
    scales that are no scalars, zero points other than 0.

    Raises:
        ModelError: names the node and the rule.
    """
    if model.ir_version > IR_VERSION:
        raise ModelError(f"the file has format version {model.ir_version}; the runtime reads up to {IR_VERSION}")
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("") not in (12, 13) or opsets.get("com.microsoft") != 1:
        raise ModelError(f"the file imports {opsets}; the runtime needs opset 12 or 13, and com.microsoft 1")
    constants = {t.name: t for t in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, int] = {}
    for name in (*(n for node in model.graph.node for n in node.input), *(o.name for o in model.graph.output)):
        readers[name] = readers.get(name, 0) + 1
    for node in model.graph.node:
        where = f"{node.op_type} {node.name!r}"
        if node.op_type == _RELU:
            maker = makers.get(node.input[0])
            if maker is None or maker.op_type not in _FUSES_RELU or readers[node.input[0]] > 1:
                raise ModelError(f"{where} fuses into nothing, and has no kernel of its own")
        elif node.domain == "com.microsoft":
            if node.op_type not in _MICROSOFT:
                raise ModelError(f"{where} is unknown to the runtime")
        elif node.domain or not onnx.defs.has(node.op_type, OPSET, ""):
            raise ModelError(f"{where} is not in opset {OPSET}")
        if node.op_type in (*_FUSES_RELU, "QuantizeLinear", "DequantizeLinear"):
            _check_scales(node, constants, where)
        if node.op_type == "MaxPool":
            _check_pool(node, makers, where)


def oldest_form(node: onnx.NodeProto, constants: Sequence[TensorProto]) -> tuple[onnx.NodeProto, list[TensorProto]]:
    """A node of a later opset as opset 13 has it, and constants that it needs besides.

    Raises:
        ModelError: it has no such form.
    """
    if node.domain not in ("", "ai.onnx"):
        raise ModelError(f"{node.op_type} {node.name!r} of {node.domain} is unknown to the runtime")
    if node.op_type in _AXES_TO_ATTRIBUTE and len(node.input) > 1:
        values = _values(constants, node.input[1])
        if values is None:
            raise ModelError(f"{node.op_type} {node.name!r} computes its axes, which opset {OPSET} does not know")
        older = onnx.NodeProto()
        older.CopyFrom(node)
        del older.input[1:]
        older.attribute.append(helper.make_attribute("axes", [int(v) for v in values.ravel()]))
        return older, []
    if node.op_type == "HardSwish" or not onnx.defs.has(node.op_type, OPSET, ""):
        raise ModelError(f"{node.op_type} {node.name!r} is not in opset {OPSET}")
    schema = onnx.defs.get_schema(node.op_type, OPSET, "")
    unknown = [a.name for a in node.attribute if a.name not in schema.attributes]
    used = [a for a in node.attribute if a.name in unknown and not _is_default(a)]
    if used or len(node.input) > schema.max_input:
        what = f"{used[0].name} of " if used else ""
        raise ModelError(f"{what}{node.op_type} {node.name!r} is not in opset {OPSET}")
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in graph.node:
                oldest_form(inner, constants)
    older = onnx.NodeProto()
    older.CopyFrom(node)
    kept = [a for a in node.attribute if a.name not in unknown]
    del older.attribute[:]
    older.attribute.extend(kept)
    if node.op_type == "Split" and len(node.input) < 2:
        del older.attribute[:]
        older.attribute.extend(a for a in kept if a.name == "axis")
    return older, []


def _is_default(attribute: onnx.AttributeProto) -> bool:
    """Whether an attribute that opset 13 does not know says what is done there anyway."""
    value = helper.get_attribute_value(attribute)
    return attribute.name in ("allowzero", "num_outputs", "saturate") and (
        attribute.name == "num_outputs" or value in (0, 1)
    )


def _check_scales(node: onnx.NodeProto, constants: Mapping[str, TensorProto], where: str) -> None:
    places = {
        "QLinearConv": ((1, 4, 6), (2, 5, 7)),
        "QLinearAdd": ((1, 4, 6), (2, 5, 7)),
        "QuantizeLinear": ((1,), (2,)),
        "DequantizeLinear": ((1,), (2,)),
    }[node.op_type]
    for place in places[0]:
        if int(np.prod(constants[node.input[place]].dims)) != 1:
            raise ModelError(f"{where} has more than one scale; the kernels refuse that")
    for place in places[1]:
        zero = constants[node.input[place]]
        if zero.data_type != TensorProto.INT8 or numpy_helper.to_array(zero).any():
            raise ModelError(f"{where} has a zero point other than int8 0; the kernels refuse that")


def _check_pool(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], where: str) -> None:
    maker = makers.get(node.input[0])
    behind = maker
    if maker is not None and maker.op_type == _RELU:
        behind = makers.get(maker.input[0])
    if behind is None or behind.op_type != "QLinearConv":
        return
    a: dict[str, Any] = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    kernel, strides, pads = a["kernel_shape"], a.get("strides", [1, 1]), a.get("pads", [0, 0, 0, 0])
    square = len(set(kernel)) == 1 and len(set(strides)) == 1 and len(set(pads)) == 1
    fits = max(*kernel, *strides, *pads) <= 3
    odd = a.get("ceil_mode") or "auto_pad" in a or any(d != 1 for d in a.get("dilations", [1]))
    if not square or not fits or odd or (pads[0] and maker is behind):
        raise ModelError(f"{where} behind a convolution would be fused, and wrongly")


def _values(constants: Sequence[TensorProto], name: str) -> Any:
    return next((numpy_helper.to_array(t) for t in constants if t.name == name), None)
