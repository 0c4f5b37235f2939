"""Write a program as standard ONNX: the reference model for the host. Stock ONNX Runtime computes the same integers.

- Convolutions and products are QLinearConv with a weight scale for each output channel. A product is a 1 × 1
  convolution because it needs an int32 bias.
- Relus are integer Clips. Max pooling, concatenation and data movement work on the integers.
- A sum is written out in float32 operations that are exact on its integers. The runtime's QLinearAdd rounds once, but
  the array rounds each operand and saturates at other points. The sum ends in Cast, not QuantizeLinear, so that the
  runtime does not fuse it.
- Inputs of float parts are dequantized by Cast and Mul, not by DequantizeLinear. After a DequantizeLinear, the
  runtime's optimiser would quantize weights that must stay in float, and replace the operators that read them by
  integer operators.
- Channels are sorted for the array (`channels`). To compare tensors one by one with those of the float model, first
  convert the program with `in_origin_order`. The result has the same integers in the float model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Array, Pool, Program, Tile, Weighted, tile_values
from edgeq.model.convert import from_bytes
from edgeq.model.edit import Editor
from edgeq.model.graph import MAIN_DOMAINS
from edgeq.model.parts import forget_types
from edgeq.signature import Signature, TensorSpec

Operand = tuple[ir.Value, ir.Value, ir.Value]
"""A tensor of integers, with its scale and zero point."""

OPSET = 17

IR_VERSION = 8


def host_reference_model(program: Program, signature: Signature) -> ir.Model:
    """Return the reference model of `program`.

    Args:
        signature: the float model's signature, for the names and types of inputs and outputs.
    """
    return ModelWriter(program, signature).model


class ModelWriter:
    """Write a program as the reference model, step by step."""

    opsets: Mapping[str, int] = {"": OPSET}
    ir_version = IR_VERSION

    def __init__(self, program: Program, signature: Signature) -> None:
        self._program = program
        inputs = [_typed(ir.Value(name=spec.name), spec) for spec in signature.inputs]
        graph = ir.Graph(inputs, [], nodes=(), opset_imports=dict(self.opsets), name=program.name)
        self.model = ir.Model(graph, ir_version=self.ir_version, producer_name="edgeq")
        self._editor = Editor(self.model)
        self._constant = self._editor.constant
        self._values = {value.name or "": value for value in inputs}
        # The names of the program's tensors are reserved, so intermediate tensors get other names.
        self._tensors = {name for name in program.tensors if name not in self._values}
        for name in sorted(self._tensors):
            self._editor.free_value_name(name)
        self._read_in_float = {name for step in program.steps if isinstance(step, steps.Float) for name in step.inputs}
        write: Mapping[type, Callable[[Any], object]] = {
            steps.Quantize: self._quantize,
            steps.Dequantize: self._dequantize,
            steps.Conv: self._conv,
            steps.Fc: self._fc,
            steps.ResidualAdd: self._add,
            steps.MaxPool: self._max_pool,
            steps.AveragePool: self._average,
            steps.Clamp: self._clamp,
            steps.Concat: self._concat,
            steps.Rearrange: self._rearrange,
            steps.Float: self._float,
        }
        for step in program.steps:
            write[type(step)](step)
        graph.outputs.extend(_typed(self._values[spec.name], spec) for spec in signature.outputs)
        # The types were needed to insert nodes. A file without them leaves the types to the runtime.
        forget_types(graph)

    # The next methods each write one kind of step.

    def _quantize(self, step: steps.Quantize) -> None:
        inputs = [self._values[step.input], *self._params(step.output)]
        self._node("QuantizeLinear", inputs, step.name, step.output)

    def _dequantize(self, step: steps.Dequantize) -> None:
        if step.output not in self._read_in_float:
            self._node("DequantizeLinear", self._operand(step.input), step.name, step.output)
            return
        tensor = self._program.tensors[step.input]
        # Use one factor for each value of the last axis. The optimiser would move a single factor past a product, which
        # would change the rounding.
        scales = self._constant(f"{step.input}/scales", np.full(tensor.shape[-1:], tensor.params.scale))
        cast = self._as_float(step.input, f"{step.name}/cast", f"{step.input}/float")
        self._node("Mul", [cast, scales], step.name, step.output)

    def _conv(self, step: steps.Conv) -> None:
        output = self._qlinear_conv(
            step.name,
            self._operand(step.input),
            (step.weights, _scales(step.tiles), step.bias),
            step.output,
            f"{step.name}/conv" if step.relu or step.pool else step.output,
            group=step.groups,
            strides=step.strides,
            dilations=step.dilations,
            pads=step.pads,
        )
        if step.relu:
            output = self._relu(step.name, output, f"{step.name}/relu" if step.pool else step.output)
        if step.pool is not None:
            self._pool(step.pool, output, f"{step.name}/pool", step.output)

    def _fc(self, step: steps.Fc) -> None:
        name, depth = step.name, step.weights.shape[1]
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{name}/column", np.array([-1, depth, 1, 1], np.int64))
        rows_shape = self._constant(f"{name}/back", np.array([-1, *shape[1:]], np.int64))
        rows = self._node("Reshape", [self._values[step.input], column], f"{name}/as-image", f"{name}/rows")
        self._node("Reshape", [self._product(step, rows), rows_shape], f"{name}/as-rows", step.output)

    def _product(self, step: steps.Fc, rows: ir.Value) -> ir.Value:
        """Write a product as a 1 × 1 convolution of `rows` [N, K, 1, 1]."""
        layer = (step.weights[:, :, None, None], _scales(step.tiles), step.bias)
        source = (rows, *self._params(step.input))
        product = self._qlinear_conv(step.name, source, layer, step.output, f"{step.name}/product")
        return self._relu(step.name, product, f"{step.name}/relu") if step.relu else product

    def _add(self, step: steps.ResidualAdd) -> None:
        name = step.name
        low, zero, high = (self._constant(f"float/{v}", np.array(v, np.float32)) for v in (-128, 0, 127))
        parts = []
        operands = (("left", step.left, step.left_multiplier), ("right", step.right, step.right_multiplier))
        for side, tensor, factor in operands:
            prefix = f"{name}/{side}"
            multiplier = self._constant(f"{prefix}/multiplier", np.array(factor, np.float32))
            part = self._as_float(tensor, f"{prefix}/cast", f"{prefix}/float")
            part = self._node("Mul", [part, multiplier], f"{prefix}/scale", f"{prefix}/scaled")
            part = self._node("Round", [part], f"{prefix}/round", f"{prefix}/rounded")
            parts.append(self._node("Clip", [part, low, high], f"{prefix}/clip", f"{prefix}/cut"))
        total = self._node("Add", parts, f"{name}/add", f"{name}/sum")
        total = self._node("Clip", [total, zero if step.relu else low, high], f"{name}/clip", f"{name}/sat")
        # The node with the sum's name computes the final integers, so that no intermediate tensor in other units is
        # mistaken for the sum.
        self._node("Cast", [total], name, step.output, to=ir.DataType.INT8)

    def _max_pool(self, step: steps.MaxPool) -> None:
        windows: dict[str, Any] = {"kernel_shape": step.kernel, "strides": step.strides, "dilations": step.dilations}
        self._node("MaxPool", [self._values[step.input]], step.name, step.output, pads=step.pads, **windows)

    def _average(self, step: steps.AveragePool) -> None:
        """Write an average pooling as a depthwise convolution with ones, with the weight scale 1 / window."""
        channels = self._program.tensors[step.input].shape[1]
        ones = np.ones((channels, 1, *step.kernel), np.int8)
        layer = (ones, np.float32(1 / (step.kernel[0] * step.kernel[1])), None)
        windows: dict[str, Any] = {"strides": step.strides, "pads": step.pads}
        self._qlinear_conv(step.name, self._operand(step.input), layer, step.output, group=channels, **windows)

    def _clamp(self, step: steps.Clamp) -> None:
        bounds = [self._constant(f"int8/{v}", np.array(v, np.int8)) for v in (step.low, step.high)]
        self._node("Clip", [self._values[step.input], *bounds], step.name, step.output)

    def _concat(self, step: steps.Concat) -> None:
        self._node("Concat", [self._values[name] for name in step.inputs], step.name, step.output, axis=step.axis)

    def _rearrange(self, step: steps.Rearrange) -> None:
        self._graft(from_bytes(step.model), {step.input: self._values[step.input]}, step.name)

    def _float(self, step: steps.Float) -> None:
        self._graft(from_bytes(step.model), {name: self._values[name] for name in step.inputs}, step.name)

    # The next methods help to write steps.

    def _prepare(self, part: ir.Model) -> None:
        """Import the opsets that a part needs."""
        imports = self.model.graph.opset_imports
        for domain in {node.domain for node in part.graph.all_nodes()}:
            main = domain in MAIN_DOMAINS
            version = part.graph.opset_imports.get(domain, 1)
            # A part may use a newer opset than the rest, and a model has one version of each domain.
            imports["" if main else domain] = max(version, OPSET if main else 1, imports.get(domain, 1))

    def _graft(self, part: ir.Model, inputs: Mapping[str, ir.Value], prefix: str) -> dict[str, ir.Value]:
        """Move the nodes and constants of a part to the end of the graph. The part is empty after that.

        Args:
            inputs: the values that replace the part's inputs, by name.
            prefix: text in front of the names of the part's constants.

        Returns:
            The part's outputs by name, which become tensors of the program and keep their names. The nodes, and the
                tensors between them, get new names if their names are already in the graph. This happens to a Split,
                for example, because it is grafted once for each of its outputs.
        """
        self._prepare(part)
        graph = part.graph
        for value in graph.inputs:
            value.replace_all_uses_with(inputs[value.name or ""])
        for value in graph.initializers.values():
            if value.uses() and value.const_value is not None:
                # The prefix keeps constants of different parts apart; equal ones are shared.
                value.replace_all_uses_with(self._constant(f"{prefix}/{value.name}", value.const_value))
        outputs = {value.name or "": value for value in graph.outputs}
        graph.outputs.clear()
        nodes = list(graph)
        for node in nodes:
            node.name = self._editor.free_node_name(node.name or "")
            for value in node.outputs:
                if value.name and value.name not in outputs:
                    value.name = self._editor.free_value_name(value.name)
        graph.remove(nodes)
        self._editor.graph.extend(nodes)
        self._values.update(outputs)
        return outputs

    def _pool(self, pool: Pool, source: ir.Value, name: str, output: str) -> ir.Value:
        """Write the max pooling that the array applies to a convolution's output."""
        kernel, strides, pads = (pool.size,) * 2, (pool.stride,) * 2, (pool.padding,) * 4
        return self._node("MaxPool", [source], name, output, kernel_shape=kernel, strides=strides, pads=pads)

    def _relu(self, name: str, source: ir.Value, output: str) -> ir.Value:
        return self._node("Clip", [source, self._zero()], f"{name}/relu", output)

    def _as_float(self, tensor: str, name: str, output: str) -> ir.Value:
        return self._node("Cast", [self._values[tensor]], name, output, to=ir.DataType.FLOAT)

    def _qlinear_conv(
        self,
        name: str,
        data: Operand,
        layer: tuple[Array, NDArray[np.float32] | np.float32, Array | None],
        tensor: str,
        output: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Insert a QLinearConv.

        Args:
            data: the input with its scale and zero point.
            layer: the weights [O, I, kh, kw], their scale or scales [O], and the bias.
            tensor: the program's tensor whose scale becomes the output's scale.
            output: name of the output; "" means the name of `tensor`.
        """
        weights, scales, bias = layer
        zero = self._constant(f"{name}/weight-zero", np.zeros(scales.shape, np.int8)) if scales.ndim else self._zero()
        weight_inputs = [
            self._constant(f"{name}/weights", weights),
            self._constant(f"{name}/weight-scale", np.asarray(scales)),
        ]
        inputs = [*data, *weight_inputs, zero, *self._params(tensor)]
        if bias is not None:
            inputs.append(self._constant(f"{name}/bias", bias))
        return self._node("QLinearConv", inputs, name, output or tensor, kernel_shape=weights.shape[2:], **attributes)

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, output: str, *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Insert a node. Its output, called `output`, is a tensor of the program or an intermediate tensor."""
        # The same program must always give the same bytes.
        ordered = dict(sorted(attributes.items()))
        value = self._editor.node(op_type, inputs, name, output=output, domain=domain, attributes=ordered)
        if output in self._tensors:
            value.name = output
            self._values[output] = value
        return value

    def _operand(self, tensor: str) -> Operand:
        return self._values[tensor], *self._params(tensor)

    def _params(self, tensor: str) -> tuple[ir.Value, ir.Value]:
        """Return the scale and zero point of a tensor as constants."""
        return self._constant(f"{tensor}/scale", self._program.tensors[tensor].params.scale), self._zero()

    def _zero(self) -> ir.Value:
        return self._constant("int8/0", np.array(0, np.int8))


def _typed(value: ir.Value, spec: TensorSpec) -> ir.Value:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        return value  # a sequence or an optional; the signature describes its elements
    value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
    value.shape = None if spec.shape is None else ir.Shape(spec.shape)
    return value


def _scales(tiles: tuple[Tile, ...]) -> NDArray[np.float32] | np.float32:
    """Return the weight scale of each output channel, or a single scale if all are equal."""
    scales = tile_values(tiles, "weight_scale")
    # One scale for all channels is the plain form of the operator.
    return scales if len(set(scales.tolist())) > 1 else scales[0]


Order = NDArray[np.int64]


def in_origin_order(program: Program) -> Program:
    """Return `program` with every tensor's channels in the float model's order. The array cannot run the result.

    If a layer's output channels change places, each channel gets a tile of its own, which the array does not support.
    """
    places = {name: np.argsort(t.channels) for name, t in program.tensors.items() if t.channels is not None}
    reshaped = {s.output: s.input for s in program.steps if isinstance(s, steps.Rearrange) and s.index is None}
    restored = tuple(
        _restored(step, places, reshaped) if isinstance(step, Weighted) else step for step in program.steps
    )
    tensors = {name: replace(tensor, channels=None) for name, tensor in program.tensors.items()}
    return replace(program, steps=restored, tensors=tensors)


def _restored(step: Weighted, places: Mapping[str, Order], reshaped: Mapping[str, str]) -> Weighted:
    """Return a copy of a layer that reads and writes its channels in the float model's order."""
    weights, bias, tiles = step.weights, step.bias, step.tiles
    outputs = places.get(step.output)
    if outputs is not None:
        scales, multipliers = (tile_values(tiles, field)[outputs].tolist() for field in ("weight_scale", "multiplier"))
        tiles = tuple(Tile(i, i + 1, *both) for i, both in enumerate(zip(scales, multipliers, strict=True)))
        weights, bias = weights[outputs], bias[outputs]
    if isinstance(step, steps.Fc) or step.groups == 1:
        inputs = places.get(step.input, places.get(reshaped.get(step.input, "")))
        if inputs is not None:
            # A product that reads flattened images has, for each channel, one weight per pixel.
            repeat = weights.shape[1] // len(inputs)
            weights = weights[:, (inputs[:, None] * repeat + np.arange(repeat)).ravel()]
    return replace(step, weights=weights, bias=bias, tiles=tiles)
