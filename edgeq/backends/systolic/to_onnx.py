"""Write a program as ONNX: the reference model for the host, and the file for onnxruntime-riscv.

The reference model is standard ONNX. With it, stock ONNX Runtime computes the same integers:

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

onnxruntime-riscv has an execution provider that runs on the array. Its dialect is opset 13, format version 7, with
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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Array, Pads, Pool, Program, Tile, Weighted, tile_values
from edgeq.backends.systolic.recognise import Windows
from edgeq.errors import ModelError
from edgeq.model.convert import from_bytes
from edgeq.model.edit import Editor
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
    return _ModelWriter(program, signature).model


class _ModelWriter:
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
        made = self._as_float(step.input, f"{step.name}/cast", f"{step.input}/float")
        self._node("Mul", [made, scales], step.name, step.output)

    def _conv(self, step: steps.Conv) -> None:
        made = self._qlinear_conv(
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
            made = self._relu(step.name, made, f"{step.name}/relu" if step.pool else step.output)
        if step.pool is not None:
            self._pool(step.pool, made, f"{step.name}/pool", step.output)

    def _fc(self, step: steps.Fc) -> None:
        name, depth = step.name, step.weights.shape[1]
        shape = self._program.tensors[step.output].shape
        column = self._constant(f"{name}/column", np.array([-1, depth, 1, 1], np.int64))
        back = self._constant(f"{name}/back", np.array([-1, *shape[1:]], np.int64))
        rows = self._node("Reshape", [self._values[step.input], column], f"{name}/as-image", f"{name}/rows")
        self._node("Reshape", [self._product(step, rows), back], f"{name}/as-rows", step.output)

    def _product(self, step: steps.Fc, rows: ir.Value) -> ir.Value:
        """Write a product as a 1 × 1 convolution of `rows` [N, K, 1, 1]."""
        layer = (step.weights[:, :, None, None], _scales(step.tiles), step.bias)
        source = (rows, *self._params(step.input))
        made = self._qlinear_conv(step.name, source, layer, step.output, f"{step.name}/product")
        return self._relu(step.name, made, f"{step.name}/relu") if step.relu else made

    def _add(self, step: steps.ResidualAdd) -> None:
        name = step.name
        low, zero, high = (self._constant(f"float/{v}", np.array(v, np.float32)) for v in (-128, 0, 127))
        parts = []
        operands = (("left", step.left, step.left_multiplier), ("right", step.right, step.right_multiplier))
        for side, tensor, factor in operands:
            own = f"{name}/{side}"
            multiplier = self._constant(f"{own}/multiplier", np.array(factor, np.float32))
            part = self._as_float(tensor, f"{own}/cast", f"{own}/float")
            part = self._node("Mul", [part, multiplier], f"{own}/scale", f"{own}/scaled")
            part = self._node("Round", [part], f"{own}/round", f"{own}/rounded")
            parts.append(self._node("Clip", [part, low, high], f"{own}/clip", f"{own}/cut"))
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
        own = [self._constant(f"{name}/weights", weights), self._constant(f"{name}/weight-scale", np.asarray(scales))]
        inputs = [*data, *own, zero, *self._params(tensor)]
        if bias is not None:
            inputs.append(self._constant(f"{name}/bias", bias))
        return self._node("QLinearConv", inputs, name, output or tensor, kernel_shape=weights.shape[2:], **attributes)

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, output: str, *, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Insert a node. Its output, called `output`, is a tensor of the program or an intermediate tensor."""
        ordered = dict(sorted(attributes.items()))
        made = self._editor.node(op_type, inputs, name, output=output, domain=domain, attributes=ordered)
        if output in self._tensors:
            made.name = output
            self._values[output] = made
        return made

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


DIALECT_OPSET = 13
DIALECT_IR_VERSION = 7
_RELU = "QLinearRelu"
_FUSES_RELU = ("QLinearConv", "QLinearAdd")
_MICROSOFT = frozenset({"QLinearAdd"})
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
        where = f"{node.op_type} {node.name!r}"
        if node.op_type == _RELU:
            maker = _maker(node)
            if maker is None or maker.op_type not in _FUSES_RELU or only_reader(maker.outputs[0]) is not node:
                raise ModelError(f"{where} cannot be fused, and has no kernel of its own")
        elif node.domain == MICROSOFT:
            if node.op_type not in _MICROSOFT:
                raise ModelError(f"{where} is unknown to the runtime")
        elif node.domain or not onnx.defs.has(node.op_type, DIALECT_OPSET, ""):
            raise ModelError(f"{where} is not in opset {DIALECT_OPSET}")
        if node.op_type in (*_FUSES_RELU, "QuantizeLinear", "DequantizeLinear"):
            _check_params(node, where)
        if node.op_type == "MaxPool":
            _check_pool(node, where)


def to_oldest_form(node: ir.Node) -> None:
    """Rewrite a node of a later opset for opset 13, in place. The nodes in its subgraphs are rewritten too.

    Raises:
        ModelError: opset 13 has no form of the node.
    """
    where = f"{node.op_type} {node.name!r}"
    if node.domain not in MAIN_DOMAINS:
        raise ModelError(f"{where} of {node.domain} is unknown to the runtime")
    if node.op_type in _AXES_TO_ATTRIBUTE and len(node.inputs) > 1:
        axes = constant(node.inputs[1])
        if axes is None:
            raise ModelError(f"{where} computes its axes, which opset {DIALECT_OPSET} does not know")
        node.resize_inputs(1)
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.ravel().tolist())
        return
    if node.op_type == "HardSwish" or not onnx.defs.has(node.op_type, DIALECT_OPSET, ""):
        raise ModelError(f"{where} is not in opset {DIALECT_OPSET}")
    schema = onnx.defs.get_schema(node.op_type, DIALECT_OPSET, "")
    unknown = [attribute for name, attribute in node.attributes.items() if name not in schema.attributes]
    used = [attribute.name for attribute in unknown if not _is_default(attribute, node.op_type)]
    if used or len(node.inputs) > schema.max_input:
        raise ModelError(f"{f'{used[0]} of ' if used else ''}{where} is not in opset {DIALECT_OPSET}")
    for inner in (inner for body in bodies(node) for inner in body):
        to_oldest_form(inner)
    for attribute in unknown:
        del node.attributes[attribute.name]


def _is_default(attribute: ir.Attr, op_type: str) -> bool:
    """Return whether opset 13, which does not define an attribute, does what the attribute requests anyway."""
    if attribute.name == "num_outputs":
        return True
    if attribute.name in ("allowzero", "saturate"):
        return attribute.value in (0, 1)
    # If a later version added an attribute, its default value describes how older versions behave.
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
        raise ModelError(f"{where} after a convolution would be fused wrongly")


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


class _DialectWriter(_ModelWriter):
    opsets: Mapping[str, int] = {"": DIALECT_OPSET, MICROSOFT: 1}
    ir_version = DIALECT_IR_VERSION

    def _dequantize(self, step: steps.Dequantize) -> None:
        self._node("DequantizeLinear", self._operand(step.input), step.name, step.output)

    def _conv(self, step: steps.Conv) -> None:
        whole = len(step.tiles) == 1
        source = self._values[step.input]
        parts = []
        for tile in step.tiles:
            name = step.name if whole else f"{step.name}/{tile.start}"
            own, groups = source, step.groups
            if not whole and step.depthwise:
                own, groups = self._slice(name, source, tile), tile.stop - tile.start
            output = step.output if whole and step.pool is None else f"{name}/out"
            windows: dict[str, Any] = {"strides": step.strides, "dilations": step.dilations, "pads": step.pads}
            made = self._tile(name, own, step, tile, output, group=groups, **windows)
            if step.pool is not None:
                made = self._pool(step.pool, made, f"{name}/pool", step.output if whole else f"{name}/pooled")
            parts.append(made)
        if not whole:
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
        made = self._qlinear_conv(name, data, layer, step.output, between, **attributes)
        return self._relu(name, made, output) if step.relu else made

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
        made = self._node("QLinearAdd", inputs, step.name, output, domain=MICROSOFT)
        if step.relu:
            self._relu(step.name, made, step.output)

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
