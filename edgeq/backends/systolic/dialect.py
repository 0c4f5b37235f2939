"""The file for onnxruntime-riscv, whose Systolic execution provider runs on the array.

Its dialect: QLinearConv with scalar scales and zero points 0; QLinearRelu, in the default domain though ONNX does not
know it, directly behind a QLinearConv or QLinearAdd that nothing else reads, where alone it has a kernel; QLinearAdd of
com.microsoft; opset 13, format version 7. What it lacks is spelled out around it:

- a layer with several weight scales is several convolutions, whose outputs are joined;
- a product is a convolution of 1 × 1, because its QLinearMatMul has no int32 bias;
- average pooling is a depthwise convolution with ones;
- max pooling behind a convolution is fused by the runtime, whatever it looks like. What the array would do wrongly
  (see `pooling`) runs in float, which for a maximum gives the same integers; so do clamps and padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeq.backends.systolic.dialect_rules import IR_VERSION, OPSET, check_dialect, oldest_form
from edgeq.backends.systolic.graph_writer import GraphWriter
from edgeq.backends.systolic.parts import grafted
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Pads,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Tile,
)
from edgeq.errors import ModelError
from edgeq.model.load import save_model
from edgeq.signature import Signature

_INTEGER_MOVES = frozenset(
    {"Concat", "Flatten", "Reshape", "Resize", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
"""Operators that the runtime moves int8 values with; other moves go through float."""


def write_dialect(program: Program, signature: Signature, path: Path) -> str:
    """Write `program` in the dialect, or say why it cannot be: a part in float that opset 13 cannot express."""
    try:
        model = dialect_model(program, signature)
    except ModelError as error:
        return error.problem
    save_model(model, path)
    return ""


def dialect_model(program: Program, signature: Signature) -> onnx.ModelProto:
    """`program` in the dialect.

    Args:
        signature: of the float model.

    Raises:
        ModelError: a part in float uses an operator in a form that opset 13 does not have.
    """
    writer = _DialectWriter(program)
    for step in program.steps:
        writer.add(step)
    model = writer.model(signature)
    check_dialect(model)
    return model


class _DialectWriter(GraphWriter):
    def model(self, signature: Signature) -> onnx.ModelProto:
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return self._model(signature, opsets, IR_VERSION)

    def add(self, step: Any) -> None:
        if isinstance(step, Quantize):
            self._node("QuantizeLinear", [step.input, *self._grid(step.output)], step.output, step.name)
        elif isinstance(step, Dequantize):
            self._node("DequantizeLinear", [step.input, *self._grid(step.input)], step.output, step.name)
        elif isinstance(step, Conv):
            self._conv(step)
        elif isinstance(step, Fc):
            self._fc(step)
        elif isinstance(step, ResidualAdd):
            self._add(step)
        elif isinstance(step, MaxPool):
            self._max_pool(step)
        elif isinstance(step, AveragePool):
            self._average(step)
        elif isinstance(step, Clamp):
            self._clamp(step)
        elif isinstance(step, Concat):
            self._node("Concat", list(step.inputs), step.output, step.name, axis=step.axis)
        elif isinstance(step, Rearrange):
            self._move(step)
        else:
            assert isinstance(step, Float)
            self._graft(onnx.load_from_string(step.model), step.name)

    def _conv(self, step: Conv) -> None:
        attributes: dict[str, Any] = {
            "strides": step.strides,
            "dilations": step.dilations,
            "pads": step.pads,
            "kernel_shape": step.weights.shape[2:],
        }
        whole = len(step.tiles) == 1
        parts = []
        for tile in step.tiles:
            name = step.name if whole else f"{step.name}/{tile.start}"
            source, groups = step.input, step.groups
            if not whole and step.depthwise:
                source, groups = self._slice(step, tile), tile.stop - tile.start
            result = step.output if whole and step.pool is None else f"{name}/out"
            self._tile(name, source, step, tile, result, relu=step.relu, group=groups, **attributes)
            if step.pool is not None:
                p = step.pool
                pooled = step.output if whole else f"{name}/pooled"
                size = {"kernel_shape": (p.size,) * 2, "strides": (p.stride,) * 2, "pads": (p.padding,) * 4}
                self._node("MaxPool", [result], pooled, f"{name}/pool", **size)
                result = pooled
            parts.append(result)
        if not whole:
            self._node("Concat", parts, step.output, f"{step.name}/join", axis=1)

    def _slice(self, step: Conv, tile: Tile) -> str:
        """The input channels of one tile of a depthwise convolution."""
        inputs = [step.input, *(self._index(v) for v in (tile.start, tile.stop, 1))]
        output = f"{step.name}/{tile.start}/in"
        self._node("Slice", inputs, output, f"{step.name}/{tile.start}/slice")
        return output

    def _index(self, value: int) -> str:
        return self._constant(f"int64/{value}", np.array([value], np.int64))

    def _tile(
        self,
        name: str,
        source: str,
        step: Conv | Fc,
        tile: Tile,
        result: str,
        *,
        relu: bool,
        **attributes: Any,
    ) -> None:
        weights = step.weights[tile.start : tile.stop]
        if isinstance(step, Fc):
            weights = weights.reshape(*weights.shape, 1, 1)
        inputs = [
            source,
            *self._grid(step.input),
            self._constant(f"{name}/weights", weights),
            self._constant(f"{name}/weight-scale", np.array(tile.weight_scale, np.float32)),
            self._zero(),
            *self._grid(step.output),
            self._constant(f"{name}/bias", step.bias[tile.start : tile.stop]),
        ]
        convolved = f"{name}/conv" if relu else result
        self._node("QLinearConv", inputs, convolved, name, **attributes)
        if relu:
            self._node("QLinearRelu", [convolved], result, f"{name}/relu")

    def _fc(self, step: Fc) -> None:
        depth = step.weights.shape[1]
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{step.name}/column", np.array([-1, depth, 1, 1], np.int64))
        back = self._constant(f"{step.name}/back", np.array([-1, *shape[1:]], np.int64))
        self._node("Reshape", [step.input, column], f"{step.name}/rows", f"{step.name}/as-image")
        parts = []
        for tile in step.tiles:
            name = step.name if len(step.tiles) == 1 else f"{step.name}/{tile.start}"
            self._tile(name, f"{step.name}/rows", step, tile, f"{name}/out", relu=step.relu, kernel_shape=(1, 1))
            parts.append(f"{name}/out")
        if len(parts) > 1:
            self._node("Concat", parts, f"{step.name}/joined", f"{step.name}/join", axis=1)
            parts = [f"{step.name}/joined"]
        self._node("Reshape", [parts[0], back], step.output, f"{step.name}/as-rows")

    def _add(self, step: ResidualAdd) -> None:
        result = f"{step.name}/sum" if step.relu else step.output
        inputs = [step.left, *self._grid(step.left), step.right, *self._grid(step.right), *self._grid(step.output)]
        self._node("QLinearAdd", inputs, result, step.name, domain="com.microsoft")
        if step.relu:
            self._node("QLinearRelu", [result], step.output, f"{step.name}/relu")

    def _max_pool(self, step: MaxPool) -> None:
        """In float behind a convolution, where the runtime would fuse it, rightly or not."""
        rows, columns = self._program.tensors[step.input].shape[2:]
        pooled = self._program.tensors[step.output].shape[2:]
        a: dict[str, Any] = {"kernel_shape": step.kernel, "strides": step.strides, "dilations": step.dilations}
        reach = [
            (pooled[i] - 1) * step.strides[i] + (step.kernel[i] - 1) * step.dilations[i] + 1 - size
            for i, size in enumerate((rows, columns))
        ]
        pads: Pads = (step.pads[0], step.pads[1], max(reach[0] - step.pads[0], 0), max(reach[1] - step.pads[1], 0))
        behind = next((node.op_type for node in self._nodes if step.input in node.output), "")
        if behind not in ("QLinearConv", "QLinearRelu") and len(set(pads)) == 1:
            self._node("MaxPool", [step.input], step.output, step.name, pads=pads, **a)
            return
        source = self._in_float(step.name, step.input)
        if any(pad >= span for pad, span in zip(pads[2:], step.kernel, strict=True)):
            raise ModelError(f"the last windows of {step.name!r} lie in its padding")
        self._node("MaxPool", [source], f"{step.name}/float-out", step.name, pads=pads, **a)
        self._from_float(step.name, step.output)

    def _average(self, step: AveragePool) -> None:
        channels = self._program.tensors[step.input].shape[1]
        share = np.float32(1 / (step.kernel[0] * step.kernel[1]))
        inputs = [
            step.input,
            *self._grid(step.input),
            self._constant(f"{step.name}/ones", np.ones((channels, 1, *step.kernel), np.int8)),
            self._constant(f"{step.name}/share", np.array(share, np.float32)),
            self._zero(),
            *self._grid(step.output),
        ]
        a: dict[str, Any] = {"strides": step.strides, "pads": step.pads, "kernel_shape": step.kernel}
        self._node("QLinearConv", inputs, step.output, step.name, group=channels, **a)

    def _clamp(self, step: Clamp) -> None:
        scale = self._program.tensors[step.output].scale
        assert scale is not None
        source = self._in_float(step.name, step.input)
        bounds = [
            self._constant(f"{step.name}/{side}", np.array(np.float32(value) * np.float32(scale), np.float32))
            for side, value in (("low", step.low), ("high", step.high))
        ]
        self._node("Clip", [source, *bounds], f"{step.name}/float-out", step.name)
        self._from_float(step.name, step.output)

    def _move(self, step: Rearrange) -> None:
        part = onnx.load_from_string(step.model)
        if all(node.op_type in _INTEGER_MOVES for node in part.graph.node):
            self._graft(part, step.name)
            return
        source = self._in_float(step.name, step.input)
        for value in (*part.graph.input, *part.graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        for node in part.graph.node:
            for names in (node.input, node.output):
                for place, name in enumerate(names):
                    names[place] = {step.input: source, step.output: f"{step.name}/float-out"}.get(name, name)
        self._graft(part, step.name)
        self._from_float(step.name, step.output)

    def _in_float(self, name: str, tensor: str) -> str:
        self._node("DequantizeLinear", [tensor, *self._grid(tensor)], f"{name}/float-in", f"{name}/dequantize")
        return f"{name}/float-in"

    def _from_float(self, name: str, tensor: str) -> None:
        self._node("QuantizeLinear", [f"{name}/float-out", *self._grid(tensor)], tensor, f"{name}/quantize")

    def _graft(self, part: onnx.ModelProto, name: str) -> None:
        nodes, constants = grafted(part, name)
        for node in nodes:
            made, more = oldest_form(node, constants)
            self._nodes.append(made)
            constants.extend(more)
        used = {n for node in self._nodes for n in node.input}
        self._constants.update((t.name, t) for t in constants if t.name in used)

    def _grid(self, tensor: str) -> tuple[str, str]:
        """Scale and zero point."""
        return self._scale(tensor), self._zero()
