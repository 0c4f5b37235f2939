"""Write ncnn's arithmetic as a float ONNX model, whose answers are those of ncnn's kernels.

Each int8 layer becomes float operators that follow ncnn's formulas (`quantize`). Its products and sums are integers, so
float32 computes them exactly while no sum exceeds 2^24. A layer with larger sums is split along its input channels, and
its parts are added as 32-bit integers. ncnn multiplies and adds without a rounding between, so float64 does that here.

    q = min(round_half_away(|x * input|), 127) * sign(x)      y = fused(layer(q, weights), 1 / (input * weights), bias)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.ncnn.centre import centre
from edgeq.backends.ncnn.lower import NotInNcnnError
from edgeq.backends.ncnn.network import LayerScales
from edgeq.backends.ncnn.quantize import factor_of, layer_scales
from edgeq.backends.ncnn.sums import write_ordered_sums
from edgeq.errors import ModelError
from edgeq.model.edit import Editor, drop_unused_initializers, replace_node, replace_value
from edgeq.model.fixed_shapes import at_batch_one
from edgeq.model.graph import (
    channel_axis,
    constant_values,
    is_constant,
    is_op,
    maker,
    name_of,
    named_values,
    node_input,
    sizes,
)
from edgeq.model.pools import write_whole_pools
from edgeq.model.quant_params import QuantParams, params_of
from edgeq.run.session import SessionSettings

SETTINGS = SessionSettings(optimization="none")
"""Settings for sessions of the emulation. ONNX Runtime's optimiser would fold the factors into the weights, which would
round other numbers.
"""
_MOST = 127
_EXACT = 2**24
_LAYERS = ("Conv", "Gemm", "MatMul")


def emulation(model: ir.Model, source: Path) -> ir.Model:
    """Return a float model that computes what ncnn computes for a Q/DQ model, with the same inputs and outputs.

    Args:
        source: the model's file, for messages.

    Raises:
        ModelError: ncnn has no int8 form of a layer; the message names the node.
    """
    emulated = model.clone()
    write_whole_pools(emulated)
    centre(emulated)
    # The order of sums depends on sizes, which a file may leave out.
    fixed = at_batch_one(emulated, source, "ncnn")
    shapes = {name: shape for name, value in named_values(fixed.graph).items() if (shape := sizes(value)) is not None}
    writer = _Writer(Editor(emulated), shapes)
    for node in list(emulated.graph):
        if is_op(node, *_LAYERS) and _is_dequantized(node.inputs[0]) and _is_dequantized(node.inputs[1]):
            try:
                writer.write(node)
            except NotInNcnnError as refusal:
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}) cannot run in int8 in ncnn: {refusal}",
                    "Keep it in float with ⟨exclude⟩",
                ) from refusal
    # ncnn rounds nothing else.
    for node in [node for node in emulated.graph if is_op(node, "DequantizeLinear")]:
        quantizer = node.inputs[0].producer() if node.inputs[0] is not None else None
        if quantizer is not None and is_op(quantizer, "QuantizeLinear") and quantizer.inputs[0] is not None:
            _bypass(node, quantizer.inputs[0], writer.editor)
    for node in [node for node in reversed(emulated.graph) if is_op(node, "QuantizeLinear", "DequantizeLinear")]:
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            emulated.graph.remove(node, safe=True)
    write_ordered_sums(emulated, shapes)
    drop_unused_initializers(emulated.graph)
    return emulated


@dataclass(frozen=True)
class _Writer:
    """Write the operators of int8 layers. Layers that round one tensor alike share the operators for that."""

    editor: Editor
    shapes: Mapping[str, tuple[int, ...]]
    rounded: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)

    def write(self, node: ir.Node) -> None:
        """Replace one layer."""
        source, weight = maker(node.inputs[0]), maker(node.inputs[1])  # type: ignore[arg-type]
        input_params, params = params_of(source), params_of(weight)
        if input_params is None or params is None:
            raise NotInNcnnError("a scale is computed")
        axis = channel_axis(node) % constant_values(weight.inputs[0]).ndim
        integers, scales = layer_scales(
            constant_values(weight.inputs[0]), params, input_params, axis, node.attributes.get_int("group", 1)
        )
        value = maker(source.inputs[0]).inputs[0]  # type: ignore[arg-type]
        assert value is not None
        result = self._products(node, self._round(value, input_params, node), integers, axis)
        shape = [1, -1, *[1] * (integers.ndim - 2)] if is_op(node, "Conv") else [-1]
        channels = integers.shape[axis]
        numbers: list[NDArray[np.floating]] = [_back(scales, channels).reshape(shape)]
        bias = node_input(node, 2)
        if bias is not None:
            numbers.append(np.broadcast_to(_floats(bias).ravel(), channels).reshape(shape))
        # ncnn's InnerProduct rounds the product before it adds the bias. Its convolutions round once.
        result = self._scaled(node, result, numbers, fused=not self._is_inner_product(node))
        result.shape, result.type = node.outputs[0].shape, node.outputs[0].type
        replace_node(node, result)

    def _scaled(self, node: ir.Node, sums: ir.Value, numbers: list[NDArray[np.floating]], *, fused: bool) -> ir.Value:
        """Write sums times the first number, plus the second number if there is one."""
        # Products of float32 numbers are exact in float64, so only the last Cast rounds, as a fused multiply-add does.
        if fused:
            sums = self._node("Cast", [sums], node, {"to": ir.DataType.DOUBLE})
        for kind, number in zip(("Mul", "Add"), numbers, strict=False):
            constant = number.astype(np.float64 if fused else np.float32)
            sums = self._node(kind, [sums, self._constant(node, constant)], node)
        return self._node("Cast", [sums], node, {"to": ir.DataType.FLOAT}) if fused else sums

    def _is_inner_product(self, node: ir.Node) -> bool:
        """Return whether the file has an InnerProduct for a node."""
        image, padded = self.shapes.get(name_of(node.inputs[0]), ()), any(node.attributes.get_ints("pads", []))
        return not is_op(node, "Conv") or (set(image[2:]) == {1} and not padded)

    def _round(self, value: ir.Value, params: QuantParams, node: ir.Node) -> ir.Value:
        factor = np.asarray(factor_of(params), np.float32)
        key = value, factor.tobytes()
        if key not in self.rounded:
            half, most = (self._constant(node, np.asarray(number, np.float32)) for number in (0.5, _MOST))
            scaled = self._node("Mul", [value, self._constant(node, factor)], node)
            size = self._node("Abs", [scaled], node)
            whole = self._node("Floor", [size], node)
            # Adding a half before rounding down would round 0.49999997 up.
            up = self._node("GreaterOrEqual", [self._node("Sub", [size, whole], node), half], node)
            up = self._node("Cast", [up], node, {"to": ir.DataType.FLOAT})
            limited = self._node("Min", [self._node("Add", [whole, up], node), most], node)
            self.rounded[key] = self._node("Mul", [limited, self._node("Sign", [scaled], node)], node)
        return self.rounded[key]

    def _products(self, node: ir.Node, source: ir.Value, integers: NDArray[np.int8], axis: int) -> ir.Value:
        """Write the layer on integers, in as many parts as its sums need."""
        attributes = {k: v.value for k, v in node.attributes.items()}
        parts = _parts(integers, axis)
        inputs = 1 if is_op(node, "Conv") else 1 - axis
        if len(parts) > 1 and attributes.get("group", 1) != 1:
            raise NotInNcnnError("its sums are too large for its groups")
        sums = []
        for start, end in parts:
            part = np.take(integers, range(start, end), inputs) if len(parts) > 1 else integers
            piece = source
            if len(parts) > 1:
                # The products of a Gemm or MatMul are along the last axis of its input.
                place = 1 if is_op(node, "Conv") else -1
                ends = [self._constant(node, np.array([number], np.int64)) for number in (start, end, place)]
                piece = self._node("Slice", [source, *ends], node)
            weights = self._constant(node, part.astype(np.float32))
            sums.append(self._node(node.op_type, [piece, weights], node, attributes))
        if len(sums) == 1:
            return sums[0]
        total = self._node("Cast", [sums[0]], node, {"to": ir.DataType.INT32})
        for number in sums[1:]:
            total = self._node("Add", [total, self._node("Cast", [number], node, {"to": ir.DataType.INT32})], node)
        return self._node("Cast", [total], node, {"to": ir.DataType.FLOAT})

    def _node(
        self, kind: str, inputs: list[ir.Value], node: ir.Node, attributes: dict[str, object] | None = None
    ) -> ir.Value:
        return self.editor.node(kind, inputs, f"{node.name}/{kind}", before=node, attributes=attributes or {})

    def _constant(self, node: ir.Node, values: NDArray[np.generic]) -> ir.Value:
        return self.editor.constant(f"{node.name}/number", values)


def _back(scales: LayerScales, channels: int) -> NDArray[np.float32]:
    """Return the factors from sums to numbers, computed in float32 as ncnn does."""
    factors: NDArray[np.float32] = np.float32(1) / (scales.input * scales.weights)
    return np.broadcast_to(factors, channels)


def _parts(integers: NDArray[np.int8], axis: int) -> list[tuple[int, int]]:
    """Split the input channels of weights into runs whose sums float32 can hold."""
    sums = np.abs(np.moveaxis(integers, axis, 0).astype(np.int64))
    # [outputs, input channels]: the largest sum that each input channel can add.
    each = sums.reshape(*sums.shape[:2], -1).sum(axis=2) * _MOST
    parts, start, total = [], 0, np.zeros(each.shape[0], np.int64)
    for channel in range(each.shape[1]):
        total = total + each[:, channel]
        if total.max(initial=0) > _EXACT and channel > start:
            parts.append((start, channel))
            start, total = channel, each[:, channel]
    return [*parts, (start, each.shape[1])]


def _floats(value: ir.Value) -> NDArray[np.float32]:
    node = value.producer()
    if node is not None and is_op(node, "DequantizeLinear"):
        params = params_of(node)
        if params is None:
            raise NotInNcnnError("a scale is computed")
        return np.asarray(params.dequantize(constant_values(node.inputs[0])), np.float32)
    return constant_values(value)


def _is_dequantized(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is None or not is_op(node, "DequantizeLinear"):
        return False
    source = node.inputs[0]
    return is_constant(source) or (source is not None and is_op(source.producer(), "QuantizeLinear"))


def _bypass(node: ir.Node, source: ir.Value, editor: Editor) -> None:
    """Let all readers of a pair read the tensor before it."""
    output = node.outputs[0]
    if output.is_graph_output():
        # An output keeps its name, whatever computes it.
        replace_value(output, editor.node("Identity", [source], name_of(output), before=node), keep_name=True)
    else:
        replace_value(output, source)
