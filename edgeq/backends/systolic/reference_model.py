"""What the writers of both ONNX files share: the model so far, and the steps that both write alike.

A program with the channels of its tensors in the order of the float model.

Channels are sorted for the array (`order`). Where tensors are compared with the float model's, one by one, they have to
be in its order: the sums are of the same products, so that the integers are the same, in other places.

The host reference model: a program as standard ONNX that stock ONNX Runtime runs with the same integers.

- Convolutions and products are QLinearConv, one weight scale for each output channel; a product is one of 1 × 1, so
  that it has an int32 bias.
- Relus are integer Clips. Max pooling, concatenation and data movement work on the integers.
- A sum is written out in float32 operations that are exact on its integers: the runtime's QLinearAdd rounds once where
  the array rounds each operand, and saturates elsewhere. Cast, and not QuantizeLinear, so that nothing is fused.
- What a part in float reads is dequantized by Cast and Mul, too: behind a DequantizeLinear the runtime's optimiser
  quantizes weights of what was kept in float, and makes integer operators of what has such.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.fixed_batch import forget_types
from edgeq.backends.systolic.program import (
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Pool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
    Tile,
    graft,
    tile_values,
)
from edgeq.model.edit import Editor, from_bytes
from edgeq.model.graph import MAIN_DOMAINS
from edgeq.signature import Signature, TensorSpec

Params = tuple[ir.Value, ir.Value]
"""Scale and zero point."""


class GraphWriter(ABC):
    """Writes a program as an ONNX model, step by step.

    Args:
        signature: of the float model: inputs and outputs are named and typed as there.
    """

    def __init__(self, program: Program, signature: Signature, opsets: Mapping[str, int], ir_version: int) -> None:
        self._program = program
        inputs = [_typed(ir.Value(name=spec.name), spec) for spec in signature.inputs]
        graph = ir.Graph(inputs, [], nodes=(), opset_imports=dict(opsets), name=program.name)
        self._model = ir.Model(graph, ir_version=ir_version, producer_name="edgeq")
        self._editor = Editor(self._model)
        self._values = {value.name or "": value for value in inputs}
        # Names of the program's tensors are theirs; what is between them gets other ones.
        self._tensors = {name for name in program.tensors if name not in self._values}
        for name in sorted(self._tensors):
            self._editor.free_value_name(name)
        for step in program.steps:
            self._write(step)
        graph.outputs.extend(_typed(self._values[spec.name], spec) for spec in signature.outputs)
        forget_types(graph)

    @property
    def model(self) -> ir.Model:
        """The whole program as a model."""
        return self._model

    def _write(self, step: Step) -> None:
        match step:
            case Quantize():
                inputs = [self._values[step.input], *self._params(step.output)]
                self._node("QuantizeLinear", inputs, step.name, step.output)
            case Dequantize():
                self._dequantize(step)
            case Conv():
                self._conv(step)
            case Fc():
                self._fc(step)
            case ResidualAdd():
                self._add(step)
            case MaxPool():
                self._max_pool(step)
            case AveragePool():
                self._average(step)
            case Clamp():
                self._clamp(step)
            case Concat():
                inputs = [self._values[name] for name in step.inputs]
                self._node("Concat", inputs, step.name, step.output, axis=step.axis)
            case Rearrange():
                self._rearrange(step)
            case Float():
                self._graft(from_bytes(step.model), {name: self._values[name] for name in step.inputs}, step.name)

    def _dequantize(self, step: Dequantize) -> None:
        inputs = [self._values[step.input], *self._params(step.input)]
        self._node("DequantizeLinear", inputs, step.name, step.output)

    @abstractmethod
    def _conv(self, step: Conv) -> None: ...

    @abstractmethod
    def _product(self, step: Fc, rows: ir.Value) -> ir.Value:
        """A product as a convolution of 1 × 1 of `rows` [N, K, 1, 1]."""

    @abstractmethod
    def _add(self, step: ResidualAdd) -> None: ...

    @abstractmethod
    def _max_pool(self, step: MaxPool) -> None: ...

    @abstractmethod
    def _clamp(self, step: Clamp) -> None: ...

    @abstractmethod
    def _rearrange(self, step: Rearrange) -> None: ...

    def _fc(self, step: Fc) -> None:
        name, depth = step.name, step.weights.shape[1]
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{name}/column", np.array([-1, depth, 1, 1], np.int64))
        back = self._constant(f"{name}/back", np.array([-1, *shape[1:]], np.int64))
        rows = self._node("Reshape", [self._values[step.input], column], f"{name}/as-image", f"{name}/rows")
        self._node("Reshape", [self._product(step, rows), back], f"{name}/as-rows", step.output)

    def _pool(self, pool: Pool, source: ir.Value, name: str, output: str) -> ir.Value:
        """The pooling on a convolution's way out."""
        kernel, strides, pads = (pool.size,) * 2, (pool.stride,) * 2, (pool.padding,) * 4
        return self._node("MaxPool", [source], name, output, kernel_shape=kernel, strides=strides, pads=pads)

    def _average(self, step: AveragePool) -> None:
        """A depthwise convolution with ones; its weight scale is 1 / window."""
        channels = self._program.tensors[step.input].shape[1]
        self._qlinear_conv(
            step.name,
            (self._values[step.input], *self._params(step.input)),
            (np.ones((channels, 1, *step.kernel), np.int8), np.float32(1 / (step.kernel[0] * step.kernel[1])), None),
            step.output,
            group=channels,
            strides=step.strides,
            pads=step.pads,
        )

    def _qlinear_conv(
        self,
        name: str,
        data: tuple[ir.Value, ir.Value, ir.Value],
        layer: tuple[NDArray[np.int8], NDArray[np.float32] | np.float32, NDArray[np.int32] | None],
        tensor: str,
        output: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Insert a QLinearConv.

        Args:
            data: input, its scale and zero point.
            layer: weights [O, I, kh, kw], their scale or scales [O], bias.
            tensor: the program's tensor whose scale the output has.
            output: name of the output; "": that of the tensor.
        """
        weights, scales, bias = layer
        zero = self._constant(f"{name}/weight-zero", np.zeros(scales.shape, np.int8)) if scales.ndim else self._zero()
        inputs = [
            *data,
            self._constant(f"{name}/weights", weights),
            self._constant(f"{name}/weight-scale", np.asarray(scales)),
            zero,
            *self._params(tensor),
        ]
        if bias is not None:
            inputs.append(self._constant(f"{name}/bias", bias))
        return self._node("QLinearConv", inputs, name, output or tensor, kernel_shape=weights.shape[2:], **attributes)

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], name: str) -> dict[str, ir.Value]:
        """Add the nodes of a part; its outputs are tensors of the program from then on."""
        outputs = graft(self._editor, part, inputs, name)
        self._values.update(outputs)
        return outputs

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, output: str, *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Insert a node whose output is called `output`: a tensor of the program, or one between them."""
        ordered = dict(sorted(attributes.items()))
        made = self._editor.node(op_type, inputs, name, output=output, domain=domain, attributes=ordered)
        if output in self._tensors:
            made.name = output
            self._values[output] = made
        return made

    def _params(self, tensor: str) -> Params:
        return self._constant(f"{tensor}/scale", self._program.tensors[tensor].params.scale), self._zero()

    def _zero(self) -> ir.Value:
        return self._constant("int8/0", np.array(0, np.int8))

    def _constant(self, name: str, values: NDArray[Any]) -> ir.Value:
        return self._editor.constant(name, values)


def _typed(value: ir.Value, spec: TensorSpec) -> ir.Value:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return value  # a sequence or an optional, of whose elements the signature tells
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
    value.shape = None if spec.shape is None else ir.Shape(spec.shape)
    return value


Order = NDArray[np.int64]


def in_origin_order(program: Program) -> Program:
    """`program` with every tensor's channels as the float model has them, and a tile for each channel of a layer whose
    results moved: for reference, not for an array."""
    places = {name: np.argsort(t.channels) for name, t in program.tensors.items() if t.channels is not None}
    reshaped = {s.output: s.input for s in program.steps if isinstance(s, Rearrange) and s.index is None}
    steps = tuple(_restored(step, places, reshaped) if isinstance(step, Conv | Fc) else step for step in program.steps)
    tensors = {name: replace(tensor, channels=None) for name, tensor in program.tensors.items()}
    return replace(program, steps=steps, tensors=tensors)


def _restored(step: Conv | Fc, places: Mapping[str, Order], reshaped: Mapping[str, str]) -> Conv | Fc:
    """A layer that reads and writes channels in the float model's order."""
    weights, bias, tiles = step.weights, step.bias, step.tiles
    outputs = places.get(step.output)
    if outputs is not None:
        scales, multipliers = (tile_values(tiles, field)[outputs].tolist() for field in ("weight_scale", "multiplier"))
        tiles = tuple(Tile(i, i + 1, *both) for i, both in enumerate(zip(scales, multipliers, strict=True)))
        weights, bias = weights[outputs], bias[outputs]
    if isinstance(step, Fc) or step.groups == 1:
        inputs = places.get(step.input, places.get(reshaped.get(step.input, "")))
        if inputs is not None:
            # A product that reads flattened images has as many weights for each channel as there are pixels.
            repeat = weights.shape[1] // len(inputs)
            weights = weights[:, (inputs[:, None] * repeat + np.arange(repeat)).ravel()]
    return replace(step, weights=weights, bias=bias, tiles=tiles)


OPSET = 17
IR_VERSION = 8


def host_reference_model(program: Program, signature: Signature) -> ir.Model:
    """The reference model of `program`; inputs and outputs are named and typed as the float model's.

    Args:
        signature: of the float model.
    """
    return _ReferenceWriter(program, signature, {"": OPSET}, IR_VERSION).model


class _ReferenceWriter(GraphWriter):
    @functools.cached_property
    def _read_in_float(self) -> frozenset[str]:
        """Names of the tensors that parts in float read."""
        return frozenset(name for step in self._program.steps if isinstance(step, Float) for name in step.inputs)

    def _dequantize(self, step: Dequantize) -> None:
        if step.output not in self._read_in_float:
            super()._dequantize(step)
            return
        tensor = self._program.tensors[step.input]
        # One for each value of the last axis: a single factor is moved behind a product, which rounds otherwise.
        scales = self._constant(f"{step.input}/scales", np.full(tensor.shape[-1:], tensor.params.scale))
        integers = [self._values[step.input]]
        made = self._node("Cast", integers, f"{step.name}/cast", f"{step.input}/float", to=ir.DataType.FLOAT)
        self._node("Mul", [made, scales], step.name, step.output)

    def _conv(self, step: Conv) -> None:
        source = (self._values[step.input], *self._params(step.input))
        made = self._qlinear_conv(
            step.name,
            source,
            (step.weights, _scales(step.tiles), step.bias),
            step.output,
            f"{step.name}/conv" if step.relu or step.pool else step.output,
            group=step.groups,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
        )
        if step.relu:
            made = self._relu(step.name, made, f"{step.name}/relu" if step.pool else step.output)
        if step.pool is not None:
            self._pool(step.pool, made, f"{step.name}/pool", step.output)

    def _product(self, step: Fc, rows: ir.Value) -> ir.Value:
        weights = step.weights.reshape(*step.weights.shape, 1, 1)
        layer = (weights, _scales(step.tiles), step.bias)
        source = (rows, *self._params(step.input))
        made = self._qlinear_conv(step.name, source, layer, step.output, f"{step.name}/product")
        return self._relu(step.name, made, f"{step.name}/relu") if step.relu else made

    def _add(self, step: ResidualAdd) -> None:
        name = step.name
        low, zero, high = (self._constant(f"float/{v}", np.array(v, np.float32)) for v in (-128, 0, 127))
        parts = []
        operands = (("left", step.left, step.left_multiplier), ("right", step.right, step.right_multiplier))
        for side, tensor, factor in operands:
            own = f"{name}/{side}"
            multiplier = self._constant(f"{own}/multiplier", np.array(factor, np.float32))
            part = self._node("Cast", [self._values[tensor]], f"{own}/cast", f"{own}/float", to=ir.DataType.FLOAT)
            part = self._node("Mul", [part, multiplier], f"{own}/scale", f"{own}/scaled")
            part = self._node("Round", [part], f"{own}/round", f"{own}/rounded")
            parts.append(self._node("Clip", [part, low, high], f"{own}/clip", f"{own}/cut"))
        total = self._node("Add", parts, f"{name}/add", f"{name}/sum")
        total = self._node("Clip", [total, zero if step.relu else low, high], f"{name}/clip", f"{name}/sat")
        # What has the sum's name makes its integers: a tensor of other units is not to be taken for the sum.
        self._node("Cast", [total], name, step.output, to=ir.DataType.INT8)

    def _max_pool(self, step: MaxPool) -> None:
        self._node(
            "MaxPool",
            [self._values[step.input]],
            step.name,
            step.output,
            kernel_shape=step.kernel,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
        )

    def _clamp(self, step: Clamp) -> None:
        bounds = [self._constant(f"int8/{v}", np.array(v, np.int8)) for v in (step.low, step.high)]
        self._node("Clip", [self._values[step.input], *bounds], step.name, step.output)

    def _rearrange(self, step: Rearrange) -> None:
        self._graft(from_bytes(step.model), {step.input: self._values[step.input]}, step.name)

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], name: str) -> dict[str, ir.Value]:
        """The model imports what the part needs."""
        imports = self._model.graph.opset_imports
        for domain in {node.domain for node in part.graph.all_nodes()}:
            main = domain in MAIN_DOMAINS
            version = part.graph.opset_imports.get(domain, 1)
            imports["" if main else domain] = max(version, OPSET if main else 1, imports.get(domain, 1))
        return super()._graft(part, inputs, name)

    def _relu(self, name: str, source: ir.Value, output: str) -> ir.Value:
        return self._node("Clip", [source, self._zero()], f"{name}/relu", output)


def _scales(tiles: tuple[Tile, ...]) -> NDArray[np.float32] | np.float32:
    """The weight scale of each output channel; one where all are the same."""
    scales = tile_values(tiles, "weight_scale")
    return scales if len(set(scales.tolist())) > 1 else scales[0]
