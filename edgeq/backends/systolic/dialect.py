"""The file for onnxruntime-riscv, whose Systolic execution provider runs on the array.

Its dialect: QLinearConv with scalar scales and zero points 0; QLinearRelu, in the default domain though ONNX does not
know it, directly behind a QLinearConv or QLinearAdd that nothing else reads, where alone it has a kernel; QLinearAdd of
com.microsoft; opset 13, format version 7. What it lacks is composed of other operators:

- a layer with several weight scales is several convolutions, whose outputs are joined;
- a product is a convolution of 1 × 1, because its QLinearMatMul has no int32 bias;
- average pooling is a depthwise convolution with ones;
- max pooling behind a convolution is fused by the runtime, whatever its parameters. What the array would
  compute wrongly (see `pooling`) runs in float, which for a maximum gives the same integers; so do clamps and padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.backends.systolic.lower import Windows
from edgeq.backends.systolic.program import Clamp, Conv, Fc, MaxPool, Pads, Program, Rearrange, ResidualAdd, Tile
from edgeq.backends.systolic.reference_model import GraphWriter
from edgeq.errors import ModelError
from edgeq.model.edit import from_bytes
from edgeq.model.graph import (
    MAIN_DOMAINS,
    MICROSOFT,
    attributes,
    bodies,
    constant,
    constant_tensor,
    node_input,
    only_reader,
    operator_of,
)
from edgeq.model.load import save_model
from edgeq.signature import Signature

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


_INTEGER_MOVES = frozenset(
    {"Concat", "Flatten", "Reshape", "Resize", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators that the runtime moves int8 values with; other data movement goes through float."""


def write_dialect(program: Program, signature: Signature, path: Path) -> str:
    """Write `program` in the dialect, if it can be expressed there.

    Returns:
        Why nothing was written: a part in float that opset 13 cannot express; "" where the file was written.
    """
    try:
        model = dialect_model(program, signature)
    except ModelError as error:
        return error.problem
    save_model(model, path)
    return ""


def dialect_model(program: Program, signature: Signature) -> ir.Model:
    """`program` in the dialect.

    Args:
        signature: of the float model.

    Raises:
        ModelError: a part in float uses an operator in a form that opset 13 does not have.
    """
    model = _DialectWriter(program, signature, {"": OPSET, MICROSOFT: 1}, IR_VERSION).model
    check_dialect(model)
    return model


class _DialectWriter(GraphWriter):
    def _conv(self, step: Conv) -> None:
        whole = len(step.tiles) == 1
        source = self._values[step.input]
        parts = []
        for tile in step.tiles:
            name = step.name if whole else f"{step.name}/{tile.start}"
            own, groups = source, step.groups
            if not whole and step.depthwise:
                own, groups = self._slice(name, source, tile), tile.stop - tile.start
            output = step.output if whole and step.pool is None else f"{name}/out"
            windows = {"strides": step.strides, "dilations": step.dilations, "pads": step.pads}
            made = self._tile(name, own, step, tile, output, group=groups, **windows)
            if step.pool is not None:
                made = self._pool(step.pool, made, f"{name}/pool", step.output if whole else f"{name}/pooled")
            parts.append(made)
        if not whole:
            self._node("Concat", parts, f"{step.name}/join", step.output, axis=1)

    def _slice(self, name: str, source: ir.Value, tile: Tile) -> ir.Value:
        """The input channels of one tile of a depthwise convolution."""
        bounds = [self._constant(f"int64/{v}", np.array([v], np.int64)) for v in (tile.start, tile.stop, 1)]
        return self._node("Slice", [source, *bounds], f"{name}/slice", f"{name}/in")

    def _tile(
        self, name: str, source: ir.Value, step: Conv | Fc, tile: Tile, output: str, **attributes: int | tuple[int, ...]
    ) -> ir.Value:
        """The channels of one tile, relu included."""
        weights = step.weights[tile.start : tile.stop]
        if isinstance(step, Fc):
            weights = weights.reshape(*weights.shape, 1, 1)
        data = (source, *self._params(step.input))
        layer = (weights, np.float32(tile.weight_scale), step.bias[tile.start : tile.stop])
        between = f"{name}/conv" if step.relu else output
        made = self._qlinear_conv(name, data, layer, step.output, between, **attributes)
        return self._node("QLinearRelu", [made], f"{name}/relu", output) if step.relu else made

    def _product(self, step: Fc, rows: ir.Value) -> ir.Value:
        parts = []
        for tile in step.tiles:
            name = step.name if len(step.tiles) == 1 else f"{step.name}/{tile.start}"
            parts.append(self._tile(name, rows, step, tile, f"{name}/out"))
        if len(parts) == 1:
            return parts[0]
        return self._node("Concat", parts, f"{step.name}/join", f"{step.name}/joined", axis=1)

    def _add(self, step: ResidualAdd) -> None:
        operands = [p for name in (step.left, step.right) for p in (self._values[name], *self._params(name))]
        output = f"{step.name}/sum" if step.relu else step.output
        made = self._node("QLinearAdd", [*operands, *self._params(step.output)], step.name, output, domain=MICROSOFT)
        if step.relu:
            self._node("QLinearRelu", [made], f"{step.name}/relu", step.output)

    def _max_pool(self, step: MaxPool) -> None:
        """In float behind a convolution, where the runtime would fuse it even if the array computes that wrongly."""
        source, shape = self._values[step.input], self._program.tensors[step.input].shape
        windows = Windows(step.kernel, step.strides, step.dilations, step.pads)
        pads: Pads = (*step.pads[:2], *windows.end_pads(shape, self._program.tensors[step.output].shape[2:]))
        attributes: dict[str, Any] = {
            "kernel_shape": step.kernel,
            "strides": step.strides,
            "dilations": step.dilations,
            "pads": pads,
        }
        maker = source.producer()
        behind_conv = maker is not None and maker.op_type in ("QLinearConv", "QLinearRelu")
        if not behind_conv and len(set(pads)) == 1:
            self._node("MaxPool", [source], step.name, step.output, **attributes)
            return
        source = self._in_float(step.name, step.input)
        if any(pad >= span for pad, span in zip(pads[2:], step.kernel, strict=True)):
            raise ModelError(f"the last windows of {step.name!r} lie in its padding")
        pooled = self._node("MaxPool", [source], step.name, f"{step.name}/float-out", **attributes)
        self._from_float(step.name, pooled, step.output)

    def _clamp(self, step: Clamp) -> None:
        params = self._program.tensors[step.output].params
        source = self._in_float(step.name, step.input)
        bounds = [
            self._constant(f"{step.name}/{side}", params.dequantize(np.array(value)))
            for side, value in (("low", step.low), ("high", step.high))
        ]
        clipped = self._node("Clip", [source, *bounds], step.name, f"{step.name}/float-out")
        self._from_float(step.name, clipped, step.output)

    def _rearrange(self, step: Rearrange) -> None:
        part = from_bytes(step.model)
        if all(node.op_type in _INTEGER_MOVES for node in part.graph):
            self._graft(part, {step.input: self._values[step.input]}, step.name)
            return
        source = self._in_float(step.name, step.input)
        part.graph.outputs[0].name = f"{step.name}/float-out"
        (moved,) = self._graft(part, {step.input: source}, step.name).values()
        self._from_float(step.name, moved, step.output)

    def _in_float(self, name: str, tensor: str) -> ir.Value:
        inputs = [self._values[tensor], *self._params(tensor)]
        return self._node("DequantizeLinear", inputs, f"{name}/dequantize", f"{name}/float-in")

    def _from_float(self, name: str, source: ir.Value, tensor: str) -> None:
        self._node("QuantizeLinear", [source, *self._params(tensor)], f"{name}/quantize", tensor)

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], name: str) -> dict[str, ir.Value]:
        for node in part.graph:
            to_oldest_form(node)
        return super()._graft(part, inputs, name)
