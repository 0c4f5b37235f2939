"""Write a program in the dialect of onnxruntime-riscv, which has an execution provider that runs on the array.

The dialect is opset 13, format version 7, with
these operators: QLinearConv with scalar scales and zero points 0; QLinearAdd of com.microsoft; and QLinearRelu, which
is in the default domain although ONNX does not know it. QLinearRelu has a kernel only if it directly follows a
QLinearConv or QLinearAdd that has no other reader. Other operators replace what the dialect lacks:

- A layer with several weight scales becomes several convolutions, whose outputs are joined.
- A product is a 1 × 1 convolution, because the dialect's QLinearMatMul has no int32 bias.
- Average pooling is a depthwise convolution with ones.
- The runtime fuses every max pooling after a convolution, whatever its parameters. If the array would compute such a
  pooling wrongly (see `lower.fusable`), the pooling runs in float, which gives the same integers because it only
  selects values. Clamps and padding also run in float.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Pads, Program, Tile, Weighted
from edgeq.backends.systolic.recognise import Windows
from edgeq.backends.systolic.to_onnx import ModelWriter
from edgeq.errors import ModelError
from edgeq.model.convert import from_bytes
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

# The newest opset and format version that the fork of ONNX Runtime reads.
DIALECT_OPSET = 13

DIALECT_IR_VERSION = 7

_RELU = "QLinearRelu"

_FUSES_RELU = ("QLinearConv", "QLinearAdd")

_MICROSOFT = frozenset({"QLinearAdd"})

# These reductions took their axes as an attribute in opset 13. ReduceSum already had them as an input.
_AXES_TO_ATTRIBUTE = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSumSquare"}
)


def check_dialect(model: ir.Model) -> None:
    """Refuse a model that the runtime would refuse.

    The check looks for wrong versions and domains, unknown operators, a QLinearRelu that does not fuse, scales that are
    not scalars, zero points other than 0, and max pooling that the runtime would fuse wrongly.

    Raises:
        ModelError: the model breaks a rule. The message names the node and the rule.
    """
    if model.ir_version > DIALECT_IR_VERSION:
        raise ModelError(
            f"the file has format version {model.ir_version}; the runtime reads up to {DIALECT_IR_VERSION}"
        )
    opsets = dict(model.opset_imports)
    if opsets.get("") not in (12, 13) or opsets.get(MICROSOFT) != 1:
        raise ModelError(f"the file imports {opsets}; the runtime needs opset 12 or 13, and {MICROSOFT} 1")
    for node in model.graph:
        location = f"{node.op_type} {node.name!r}"
        if node.op_type == _RELU:
            maker = _maker(node)
            if maker is None or maker.op_type not in _FUSES_RELU or only_reader(maker.outputs[0]) is not node:
                raise ModelError(f"{location} cannot be fused, and has no kernel of its own")
        elif node.domain == MICROSOFT:
            if node.op_type not in _MICROSOFT:
                raise ModelError(f"{location} is unknown to the runtime")
        elif node.domain or not onnx.defs.has(node.op_type, DIALECT_OPSET, ""):
            raise ModelError(f"{location} is not in opset {DIALECT_OPSET}")
        if node.op_type in (*_FUSES_RELU, "QuantizeLinear", "DequantizeLinear"):
            _check_params(node, location)
        if node.op_type == "MaxPool":
            _check_pool(node, location)


def to_oldest_form(node: ir.Node) -> None:
    """Rewrite a node of a later opset for opset 13, in place. The nodes in its subgraphs are rewritten too.

    Raises:
        ModelError: opset 13 has no form of the node.
    """
    location = f"{node.op_type} {node.name!r}"
    if node.domain not in MAIN_DOMAINS:
        raise ModelError(f"{location} of {node.domain} is unknown to the runtime")
    if node.op_type in _AXES_TO_ATTRIBUTE and len(node.inputs) > 1:
        axes = constant(node.inputs[1])
        if axes is None:
            raise ModelError(f"{location} computes its axes, which opset {DIALECT_OPSET} does not know")
        node.resize_inputs(1)
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.ravel().tolist())
        return
    if node.op_type == "HardSwish" or not onnx.defs.has(node.op_type, DIALECT_OPSET, ""):
        raise ModelError(f"{location} is not in opset {DIALECT_OPSET}")
    schema = onnx.defs.get_schema(node.op_type, DIALECT_OPSET, "")
    unknown = [attribute for name, attribute in node.attributes.items() if name not in schema.attributes]
    used = [attribute.name for attribute in unknown if not _is_default(attribute, node.op_type)]
    if used or len(node.inputs) > schema.max_input:
        raise ModelError(f"{f'{used[0]} of ' if used else ''}{location} is not in opset {DIALECT_OPSET}")
    # The nodes of a body are under the same opset.
    for inner in (inner for body in bodies(node) for inner in body):
        to_oldest_form(inner)
    for attribute in unknown:
        del node.attributes[attribute.name]


def _is_default(attribute: ir.Attr, op_type: str) -> bool:
    """Return whether opset 13, which does not define an attribute, does what the attribute requests anyway."""
    # Opset 13 counts the outputs of a Split itself.
    if attribute.name == "num_outputs":
        return True
    # They matter only for sizes of 0 and for 8-bit floats, which no part has.
    if attribute.name in ("allowzero", "saturate"):
        return attribute.value in (0, 1)
    # If a later version added an attribute, its default value describes how older versions behave.
    newest = onnx.defs.get_schema(op_type, "").attributes.get(attribute.name)
    if newest is None or not newest.default_value.type:
        return False
    default = onnx.helper.get_attribute_value(newest.default_value)
    return bool(attribute.value == (default.decode() if isinstance(default, bytes) else default))


def _check_params(node: ir.Node, location: str) -> None:
    row = operator_of(node)
    places = [(integers.scale, integers.zero_point) for integers in row.integers]
    for scale_at, zero_at in [*places, *([row.integer_output] if row.integer_output else [])]:
        scale, zero = constant_tensor(node_input(node, scale_at)), constant_tensor(node_input(node, zero_at))
        if scale is None or scale.size != 1:
            raise ModelError(f"{location} has more than one scale; the kernels refuse that")
        if zero is None or zero.dtype != ir.DataType.INT8 or zero.numpy().any():
            raise ModelError(f"{location} has a zero point other than int8 0; the kernels refuse that")


def _check_pool(node: ir.Node, location: str) -> None:
    # The runtime fuses a pooling behind the convolution or behind its relu.
    maker = behind = _maker(node)
    if maker is not None and maker.op_type == _RELU:
        behind = _maker(maker)
    if behind is None or behind.op_type != "QLinearConv":
        return
    a = attributes(node)
    kernel, strides, pads = a["kernel_shape"], a.get("strides", [1, 1]), a.get("pads", [0, 0, 0, 0])
    square = len(set(kernel)) == 1 and len(set(strides)) == 1 and len(set(pads)) == 1
    # The instruction has two bits for each of them.
    fits = max(*kernel, *strides, *pads) <= 3
    odd = a.get("ceil_mode") or "auto_pad" in a or any(d != 1 for d in a.get("dilations", [1]))
    if not square or not fits or odd or (pads[0] and maker is behind):
        raise ModelError(f"{location} after a convolution would be fused wrongly")


def _maker(node: ir.Node) -> ir.Node | None:
    return node.inputs[0].producer() if node.inputs[0] is not None else None


_INTEGER_MOVES = frozenset(
    {"Concat", "Flatten", "Reshape", "Resize", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators with which the runtime can move int8 values. Other data movement goes through float."""


def write_dialect(program: Program, signature: Signature, path: Path) -> str:
    """Write `program` in the dialect, if the dialect can express it.

    Returns:
        The reason why nothing was written, for example a float part that opset 13 cannot express; "" if the file was
            written.
    """
    try:
        model = dialect_model(program, signature)
    # The dialect file is an extra: the reason becomes a note.
    except ModelError as error:
        return error.problem
    save_model(model, path)
    return ""


def dialect_model(program: Program, signature: Signature) -> ir.Model:
    """Return `program` in the dialect.

    Args:
        signature: the float model's signature.

    Raises:
        ModelError: a float part uses an operator in a form that opset 13 does not have.
    """
    model = _DialectWriter(program, signature).model
    check_dialect(model)
    return model


class _DialectWriter(ModelWriter):
    opsets: Mapping[str, int] = {"": DIALECT_OPSET, MICROSOFT: 1}
    ir_version = DIALECT_IR_VERSION

    def _dequantize(self, step: steps.Dequantize) -> None:
        self._node("DequantizeLinear", self._operand(step.input), step.name, step.output)

    def _conv(self, step: steps.Conv) -> None:
        is_single = len(step.tiles) == 1
        source = self._values[step.input]
        parts = []
        for tile in step.tiles:
            name = step.name if is_single else f"{step.name}/{tile.start}"
            tile_source, groups = source, step.groups
            # Each of its channels reads one input channel, so a part of the outputs needs that part of the inputs only.
            if not is_single and step.depthwise:
                tile_source, groups = self._slice(name, source, tile), tile.stop - tile.start
            output = step.output if is_single and step.pool is None else f"{name}/out"
            windows: dict[str, Any] = {"strides": step.strides, "dilations": step.dilations, "pads": step.pads}
            part = self._tile(name, tile_source, step, tile, output, group=groups, **windows)
            if step.pool is not None:
                part = self._pool(step.pool, part, f"{name}/pool", step.output if is_single else f"{name}/pooled")
            parts.append(part)
        if not is_single:
            self._node("Concat", parts, f"{step.name}/join", step.output, axis=1)

    def _slice(self, name: str, source: ir.Value, tile: Tile) -> ir.Value:
        """Write a Slice that takes the input channels of one tile of a depthwise convolution."""
        bounds = [self._constant(f"int64/{v}", np.array([v], np.int64)) for v in (tile.start, tile.stop, 1)]
        return self._node("Slice", [source, *bounds], f"{name}/slice", f"{name}/in")

    def _tile(
        self,
        name: str,
        source: ir.Value,
        step: Weighted,
        tile: Tile,
        output: str,
        **attributes: int | tuple[int, ...],
    ) -> ir.Value:
        """Write the convolution and the relu for the channels of one tile."""
        weights = step.weights[tile.start : tile.stop]
        if isinstance(step, steps.Fc):
            weights = weights[:, :, None, None]
        data = (source, *self._params(step.input))
        layer = (weights, np.float32(tile.weight_scale), step.bias[tile.start : tile.stop])
        between = f"{name}/conv" if step.relu else output
        convolved = self._qlinear_conv(name, data, layer, step.output, between, **attributes)
        return self._relu(name, convolved, output) if step.relu else convolved

    def _product(self, step: steps.Fc, rows: ir.Value) -> ir.Value:
        parts = []
        for tile in step.tiles:
            name = step.name if len(step.tiles) == 1 else f"{step.name}/{tile.start}"
            parts.append(self._tile(name, rows, step, tile, f"{name}/out"))
        if len(parts) == 1:
            return parts[0]
        return self._node("Concat", parts, f"{step.name}/join", f"{step.name}/joined", axis=1)

    def _add(self, step: steps.ResidualAdd) -> None:
        inputs = [*self._operand(step.left), *self._operand(step.right), *self._params(step.output)]
        output = f"{step.name}/sum" if step.relu else step.output
        total = self._node("QLinearAdd", inputs, step.name, output, domain=MICROSOFT)
        if step.relu:
            self._relu(step.name, total, step.output)

    def _max_pool(self, step: steps.MaxPool) -> None:
        """Write a max pooling. If it follows a convolution, write it in float.

        After a convolution, the runtime would fuse an integer max pooling, even if the array computes it wrongly.
        """
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
        # ONNX Runtime refuses padding as large as the window.
        if any(pad >= span for pad, span in zip(pads[2:], step.kernel, strict=True)):
            raise ModelError(f"the last windows of {step.name!r} are entirely in its padding")
        pooled = self._node("MaxPool", [source], step.name, f"{step.name}/float-out", **attributes)
        self._from_float(step.name, pooled, step.output)

    def _clamp(self, step: steps.Clamp) -> None:
        params = self._program.tensors[step.output].params
        source = self._in_float(step.name, step.input)
        bounds = [
            self._constant(f"{step.name}/{side}", params.dequantize(np.array(value)))
            for side, value in (("low", step.low), ("high", step.high))
        ]
        clipped = self._node("Clip", [source, *bounds], step.name, f"{step.name}/float-out")
        self._from_float(step.name, clipped, step.output)

    def _rearrange(self, step: steps.Rearrange) -> None:
        part = from_bytes(step.model)
        if all(node.op_type in _INTEGER_MOVES for node in part.graph):
            self._graft(part, {step.input: self._values[step.input]}, step.name)
            return
        source = self._in_float(step.name, step.input)
        part.graph.outputs[0].name = f"{step.name}/float-out"
        (moved,) = self._graft(part, {step.input: source}, step.name).values()
        self._from_float(step.name, moved, step.output)

    def _in_float(self, name: str, tensor: str) -> ir.Value:
        return self._node("DequantizeLinear", self._operand(tensor), f"{name}/dequantize", f"{name}/float-in")

    def _from_float(self, name: str, source: ir.Value, tensor: str) -> None:
        self._node("QuantizeLinear", [source, *self._params(tensor)], f"{name}/quantize", tensor)

    def _relu(self, name: str, source: ir.Value, output: str) -> ir.Value:
        return self._node("QLinearRelu", [source], f"{name}/relu", output)

    def _prepare(self, part: ir.Model) -> None:
        """Rewrite the nodes of a part for opset 13."""
        for node in part.graph:
            to_oldest_form(node)
