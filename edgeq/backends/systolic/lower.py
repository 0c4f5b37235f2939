"""Lowering: from a float network and its scales to the integer program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic.fixed_batch import part_of
from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    Layer,
    MoveLayer,
    Network,
    layer_inputs,
    layer_outputs,
    readers,
)
from edgeq.backends.systolic.program import (
    ArrayConfig,
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    MaxPool,
    Pads,
    Pair,
    Pool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
    Tensor,
    as_integers,
)
from edgeq.backends.systolic.weights import LARGEST, IntegerWeights, quantize_weights
from edgeq.model.edit import to_bytes
from edgeq.model.graph import DATA_MOVEMENT, attributes, constant, geometry, is_constant, name_of, node_input, sizes
from edgeq.model.sessions import open_in_memory
from edgeq.run.session import SessionSettings

# What MaxPool selects depends on the values; the array has steps of its own for it.
MOVES = DATA_MOVEMENT - {"MaxPool"}
_EXACT = 2**24
_RESHAPE_OPSET = 13
_RESHAPE_IR = 7


def recognise_move(model: ir.Model, node: ir.Node) -> tuple[MoveLayer, ...] | str:
    """The layers of a node of `MOVES`, one for each output, or why it stays in float."""
    source = node.inputs[0]
    if source is None or is_constant(source) or source.dtype != ir.DataType.FLOAT:
        return "it moves no activations"
    if any(value is not None and not is_constant(value) for value in node.inputs[1:]):
        return "where it moves values to is computed, not constant"
    problem = _rescales(node)
    if problem:
        return problem
    shape = sizes(source)
    assert shape is not None
    outputs = tuple(value for value in node.outputs if value.name)
    if math.prod(shape) >= _EXACT:
        return "it moves too many values to follow"
    # Moving the position of each value shows where it goes.
    places = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    session = open_in_memory(part_of(model, [node], [source], outputs), SessionSettings(optimization="none"))
    moved = session.run([name_of(value) for value in outputs], {name_of(source): places})
    layers = []
    for number, (output, values) in enumerate(zip(outputs, moved, strict=True)):
        name = node.name or "" if len(outputs) == 1 else f"{node.name}/{number}"
        index = values.astype(np.int32).ravel() - 1
        if index.size == places.size and np.array_equal(index, np.arange(index.size)):
            layers.append(reshape_move(name, name_of(source), name_of(output), values.shape))
            continue
        part = part_of(model, [node], [source], [output])
        layers.append(MoveLayer(name, name_of(source), name_of(output), index, part))
    return tuple(layers)


def reshape_move(name: str, source: str, output: str, shape: tuple[int, ...]) -> MoveLayer:
    """The layer that reshapes each sample to `shape` (batch 1 in front)."""
    target = ir.tensor(np.array([0, *shape[1:]], np.int64), name=f"{name}/shape")
    before, after = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT)) for n in (source, output))
    constant = ir.Value(name=target.name, const_value=target)
    reshape = ir.Node("", "Reshape", [before, constant], outputs=[after], name=name)
    graph = ir.Graph(
        [before],
        [after],
        nodes=[reshape],
        initializers=[constant],
        opset_imports={"": _RESHAPE_OPSET},
        name="part",
    )
    return MoveLayer(name, source, output, None, ir.Model(graph, ir_version=_RESHAPE_IR))


def _rescales(node: ir.Node) -> str:
    """Why a node does more than move values; "" where it does not."""
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") == "constant":
        value = constant(node_input(node, 2))
        if value is not None and value.size and float(value.reshape(-1)[0]) != 0:
            return "it pads with a value other than zero"
    if node.op_type == "Resize" and (mode := node.attributes.get_string("mode", "nearest")) != "nearest":
        return f"its mode is {mode}; only nearest works on integers"
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if crops and node.attributes.get_float("extrapolation_value", 0.0) != 0:
        return "outside of the image it has a value other than zero"
    return ""


@dataclass(frozen=True)
class Windows:
    """How windows lie on an image; pairs are (rows, columns).

    Attributes:
        pads: (top, left, bottom, right).
    """

    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: Pads

    @classmethod
    def of(cls, node: ir.Node, shape: tuple[int, ...], kernel: Pair | None = None) -> Windows:
        """The windows of a 2-D convolution or pooling, auto_pad worked out.

        Args:
            shape: of its input, [1, C, H, W].
            kernel: of a convolution, as its weights have it; else the attribute says.
        """
        kernel = kernel or _pair(attributes(node)["kernel_shape"])
        known = geometry(node, shape[2:], kernel)
        (top, bottom), (left, right) = known.pads
        return cls(kernel, _pair(known.strides), _pair(known.dilations), (top, left, bottom, right))

    @property
    def regular(self) -> bool:
        """Whether the array's convolution calls take them: square, equal strides, no dilation, four equal pads smaller
        than the kernel."""
        square = self.kernel[0] == self.kernel[1] and self.strides[0] == self.strides[1] and len(set(self.pads)) == 1
        return square and self.dilations == (1, 1) and self.pads[0] < self.kernel[0]

    def rounded_up(self, shape: tuple[int, ...]) -> Pair:
        """Rows and columns behind a pooling with ceil_mode; no window starts beyond the input and the padding before
        it."""
        found = []
        for axis in (0, 1):
            before, stride = shape[2 + axis] + self.pads[axis], self.strides[axis]
            extent = before + self.pads[2 + axis] - (self.kernel[axis] - 1) * self.dilations[axis] - 1
            steps = -(-extent // stride)
            found.append((steps if steps * stride < before else steps - 1) + 1)
        return found[0], found[1]

    def end_pads(self, shape: tuple[int, ...], size: tuple[int, ...]) -> Pair:
        """Padding at the bottom and right that an output of `size` rows and columns needs."""
        ends = []
        for axis in (0, 1):
            last = (size[axis] - 1) * self.strides[axis] + (self.kernel[axis] - 1) * self.dilations[axis] + 1
            ends.append(max(last - shape[2 + axis] - self.pads[axis], 0))
        return ends[0], ends[1]


def _pair(values: Sequence[int]) -> Pair:
    rows, columns = values
    return rows, columns


# Window, stride and padding have two bits in the hardware's instruction, output sizes eight.
_FIELD = 3
_SIDE = 255


def direct(layer: ConvLayer, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the array's own convolution call computes a layer as it is: one group, no dilation, everything square.
    Other layers become im2col and a product, with the same results."""
    _, _, rows, columns = shapes[layer.input]
    _, _, out_rows, out_columns = shapes[layer.output]
    windows = Windows((layer.weights.shape[2], layer.weights.shape[3]), layer.strides, layer.dilations, layer.pads)
    return layer.groups == 1 and rows == columns and out_rows == out_columns and windows.regular


def fusable(layer: ConvLayer, following: Layer, shapes: Mapping[str, tuple[int, ...]]) -> Pool | None:
    """The fused form of a pooling behind a convolution that nothing else reads; None where it cannot be fused."""
    if not isinstance(following, MaxPool) or not direct(layer, shapes):
        return None
    kernel, strides, pads = following.kernel, following.strides, following.pads
    if not Windows(kernel, strides, following.dilations, pads).regular or max(kernel[0], strides[0], pads[0]) > _FIELD:
        return None
    if max(shapes[following.output][2:]) > _SIDE or max(shapes[layer.output][2:]) > _SIDE:
        return None
    # The array pads with 0, which a window of negative values would choose.
    if pads[0] and not layer.relu:
        return None
    return Pool(kernel[0], strides[0], pads[0])


LEAST = -128


def lower(
    name: str,
    network: Network,
    scales: Mapping[str, float],
    array: ArrayConfig,
    *,
    channels: Mapping[str, tuple[int, ...]] | None = None,
    depthwise_tile: int | None = None,
) -> Program:
    """Quantize weights, insert conversions between integers and floats, drop clamps that the scales imply.

    Args:
        scales: of every integer tensor (`scales.activation_scales`).
        channels: reordered channels by tensor, for the table.
        depthwise_tile: channels of depthwise layers that share a scale; None means the array's dim. With 1 they
            run on the core.
    """
    network = _without_idle_clamps(network, scales)
    work = _Lowering(network, scales, array, dict(channels or {}), depthwise_tile or array.dim)
    for layer in network.layers:
        work.add(layer)
    for output in network.outputs:
        work.as_float(output)
    return Program(name, array, network.inputs, network.outputs, dict(work.tensors), tuple(work.steps))


@dataclass
class _Lowering:
    """The steps so far."""

    network: Network
    scales: Mapping[str, float]
    array: ArrayConfig
    channels: Mapping[str, tuple[int, ...]]
    depthwise_tile: int
    steps: list[Step] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    integers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = set(self.network.shapes)
        self.read = readers(self.network.layers)
        self.fused: set[str] = set()
        for name in self.network.inputs:
            self._float_tensor(name)

    def add(self, layer: Layer) -> None:
        """Append the steps of a layer, unless it was fused into one before."""
        if layer.name in self.fused:
            return
        if isinstance(layer, Float):
            for name in layer.inputs:
                self.as_float(name)
            for name in layer.outputs:
                self._float_tensor(name)
            self.steps.append(layer)
            return
        read = tuple(self.as_integer(name) for name in layer_inputs(layer))
        self.steps.append(self._step(layer, read))

    def as_float(self, name: str) -> str:
        """The float form of a tensor, dequantized once if need be."""
        if name not in self.tensors:
            self._float_tensor(name)
            self.steps.append(Dequantize(f"{name}_DequantizeLinear", self.integers[name], name))
        return name

    def as_integer(self, name: str) -> str:
        """The int8 form of a tensor, quantized once if need be."""
        if name not in self.integers:
            self.steps.append(Quantize(f"{name}_QuantizeLinear", name, self._integer_tensor(name)))
        return self.integers[name]

    def _float_tensor(self, name: str) -> None:
        self.tensors[name] = Tensor(name, self.network.shapes[name], self.network.dtypes[name], None, name)

    def _integer_tensor(self, name: str) -> str:
        own = f"{name}_quantized"
        while own in self.taken:
            own += "_"
        self.taken.add(own)
        self.integers[name] = own
        self.tensors[own] = Tensor(
            own, self.network.shapes[name], "int8", self.scales[name], name, self.channels.get(name)
        )
        return own

    def _step(self, layer: Layer, read: tuple[str, ...]) -> Step:
        name, sources = layer.name, layer.sources
        if isinstance(layer, ConvLayer):
            return self._conv(layer, read[0])
        output = self._integer_tensor(layer_outputs(layer)[0])
        if isinstance(layer, FcLayer):
            made = self._weights(layer)
            return Fc(name, read[0], output, made.weights, made.bias, made.tiles, layer.relu, sources)
        if isinstance(layer, AddLayer):
            to = np.float32(self.scales[layer.output])
            left, right = (float(np.float32(self.scales[n]) / to) for n in (layer.left, layer.right))
            return ResidualAdd(name, read[0], read[1], output, left, right, layer.relu, sources)
        if isinstance(layer, MaxPool):
            return replace(layer, input=read[0], output=output)
        if isinstance(layer, AverageLayer):
            share = np.float32(1 / (layer.kernel[0] * layer.kernel[1]))
            step = np.float32(np.float32(self.scales[layer.input]) * share)
            factor = float(step / np.float32(self.scales[layer.output]))
            return AveragePool(name, read[0], output, layer.kernel, layer.strides, layer.pads, factor, sources)
        if isinstance(layer, ClampLayer):
            low, high = clamp_integers(layer, self.scales[layer.output])
            return Clamp(name, read[0], output, low, high, sources)
        if isinstance(layer, Concat):
            return replace(layer, inputs=read, output=output)
        assert isinstance(layer, MoveLayer)
        model = to_bytes(as_integers(layer.model, read[0], output))
        return Rearrange(name, read[0], output, layer.index, model, sources)

    def _conv(self, layer: ConvLayer, read: str) -> Conv:
        made = self._weights(layer)
        following = self.read[layer.output]
        pool = None
        output, sources = layer.output, layer.sources
        if len(following) == 1 and output not in self.network.outputs:
            pool = fusable(layer, following[0], self.network.shapes)
        if pool is not None:
            assert isinstance(following[0], MaxPool)
            self.fused.add(following[0].name)
            output, sources = following[0].output, (*sources, *following[0].sources)
        return Conv(
            layer.name,
            read,
            self._integer_tensor(output),
            made.weights,
            made.bias,
            layer.groups,
            layer.strides,
            layer.dilations,
            layer.pads,
            made.tiles,
            layer.relu,
            pool,
            self.network.shapes[layer.output],
            sources,
        )

    def _weights(self, layer: ConvLayer | FcLayer) -> IntegerWeights:
        made = quantize_weights(
            layer.weights,
            layer.bias,
            input_scale=self.scales[layer.input],
            output_scale=self.scales[layer.output],
            dim=self._tile_width(layer),
            powers_of_two=self.array.output_scale == "shift",
        )
        if not layer.input_offset:
            return made
        sums = made.weights.reshape(len(made.bias), -1).sum(axis=1, dtype=np.int32)
        return replace(made, bias=made.bias + np.int32(layer.input_offset) * sums)

    def _tile_width(self, layer: ConvLayer | FcLayer) -> int:
        """Channels that share a scale at least. Tiles would cut through the groups of a grouped convolution."""
        if isinstance(layer, FcLayer) or layer.groups == 1:
            return self.array.dim
        return self.depthwise_tile if layer.depthwise else len(layer.bias)


def clamp_integers(layer: ClampLayer, scale: float) -> tuple[int, int]:
    """The integers that a clamp's bounds are nearest to."""
    low, high = (int(np.clip(np.rint(bound / scale), LEAST, LARGEST)) for bound in (layer.low, layer.high))
    return low, high


def _without_idle_clamps(network: Network, scales: Mapping[str, float]) -> Network:
    """Take out clamps behind layers whose own saturation (and relu, which a clamp from 0 makes of them) does the same,
    to within the one step between -127 and -128."""
    read = readers(network.layers)
    makers = {name: layer for layer in network.layers for name in layer_outputs(layer)}
    replaced: dict[str, Layer] = {}
    gone: set[str] = set()
    for layer in network.layers:
        if not isinstance(layer, ClampLayer):
            continue
        low, high = clamp_integers(layer, scales[layer.output])
        maker = makers.get(layer.input)
        if maker is not None:
            maker = replaced.get(maker.name, maker)
        if not isinstance(maker, ConvLayer | FcLayer | AddLayer) or len(read[layer.input]) > 1:
            continue
        if layer.input in network.outputs or high < LARGEST or LEAST + 1 < low < 0:
            continue
        sources = (*maker.sources, *layer.sources)
        replaced[maker.name] = replace(maker, output=layer.output, relu=maker.relu or low == 0, sources=sources)
        gone.add(layer.name)
    layers = tuple(replaced.get(layer.name, layer) for layer in network.layers if layer.name not in gone)
    return replace(network, layers=layers)
