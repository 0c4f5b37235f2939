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
import onnx_ir as ir

from edgeq.backends.systolic.dialect_rules import IR_VERSION, OPSET, check_dialect, to_oldest_form
from edgeq.backends.systolic.graph_writer import GraphWriter
from edgeq.backends.systolic.program import Clamp, Conv, Fc, MaxPool, Pads, Program, Rearrange, ResidualAdd, Tile
from edgeq.backends.systolic.windows import Windows
from edgeq.errors import ModelError
from edgeq.graph.convert import from_bytes
from edgeq.graph.query import MICROSOFT
from edgeq.model.load import save_model
from edgeq.signature import Signature

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
