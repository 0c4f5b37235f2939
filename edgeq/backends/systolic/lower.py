"""Lowering: from a float network and its scales to the integer program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    Floats,
    Layer,
    MoveLayer,
    Network,
    layer_inputs,
    layer_outputs,
    readers,
)
from edgeq.backends.systolic.program import (
    LARGEST,
    LEAST,
    ArrayConfig,
    AveragePool,
    Clamp,
    Concat,
    Conv,
    Dequantize,
    Fc,
    Float,
    Int8s,
    Int32s,
    MaxPool,
    Pool,
    Program,
    Quantize,
    Rearrange,
    ResidualAdd,
    Step,
    Tensor,
    Tile,
    as_integers,
)
from edgeq.backends.systolic.recognise import Windows
from edgeq.model.edit import to_bytes
from edgeq.model.quant_params import QuantParams

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


@dataclass(frozen=True)
class IntegerWeights:
    """weights int8 as the float ones are laid out, bias int32 [O]."""

    weights: Int8s
    bias: Int32s
    tiles: tuple[Tile, ...]


def quantize_weights(
    weights: Floats,
    bias: Floats,
    *,
    input_scale: float,
    output_scale: float,
    dim: int,
    powers_of_two: bool,
) -> IntegerWeights:
    """Quantize weights [O, ...] symmetrically to -127..127, bias to int32 at input scale · weight scale.

    Args:
        dim: channels a tile.
    """
    outputs = len(weights)
    rows = weights.reshape(outputs, -1)
    limits = [
        (start, min(start + dim, outputs), _scale(rows[start : start + dim], bias[start : start + dim], input_scale))
        for start in range(0, outputs, dim)
    ]
    tiles = []
    for start, stop, scale in _merged(limits):
        if powers_of_two:
            scale = float(2.0 ** math.ceil(math.log2(scale)))
        product = np.float32(np.float32(input_scale) * np.float32(scale))
        tiles.append(Tile(start, stop, float(np.float32(scale)), float(np.float32(product / np.float32(output_scale)))))
    scales = np.repeat([t.weight_scale for t in tiles], [t.stop - t.start for t in tiles])
    zeros = np.zeros(outputs, np.int64)
    steps = (np.float32(input_scale) * scales.astype(np.float32)).astype(np.float64)
    integers = QuantParams(scales, zeros, ir.DataType.INT8, narrow=True).quantize(rows)
    biases = QuantParams(steps, zeros, ir.DataType.INT32).quantize(bias)
    return IntegerWeights(integers.reshape(weights.shape), biases, tuple(tiles))


def _scale(rows: Floats, bias: Floats, input_scale: float) -> float:
    """Scale of one tile. Where its weights are tiny beside its bias, the range of the int32 bias decides."""
    largest = _grid(rows) or float(np.abs(rows).max(initial=0.0)) / LARGEST
    offset = float(np.abs(bias).max(initial=0.0)) / input_scale
    least = offset / (LARGEST_BIAS if largest else _SMALL_BIAS)
    return float(np.float32(max(largest, least))) or 1.0


def _grid(rows: Floats) -> float:
    """The step of a grid of at most 127 steps that holds all values, as weights that were quantized before have one; 0
    where there is none."""
    flat = rows.ravel()
    largest = float(np.abs(flat).max(initial=0.0))
    if not largest:
        return 0.0
    for count in range(LARGEST, 0, -1):
        places = flat[:_FIRST] * (count / largest)
        if np.abs(places - np.rint(places)).max() > _ON_GRID:
            continue
        places = flat * (count / largest)
        if np.abs(places - np.rint(places)).max() <= _ON_GRID:
            return largest / count
    return 0.0


def _merged(limits: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    merged = [limits[0]]
    for start, stop, scale in limits[1:]:
        first, _, before = merged[-1]
        if max(scale, before) < _SAME * min(scale, before):
            merged[-1] = (first, stop, max(scale, before))
        else:
            merged.append((start, stop, scale))
    return merged


# Neighbouring tiles whose scales differ less than this share one: a split costs the runtime of the dialect file a
# convolution call, and a twentieth of a bit is not worth it.
_SAME = 1.05


# How far from a whole number float32 may put a weight of a grid; and how many weights suffice to rule out most grids.
_ON_GRID = 1e-3


_FIRST = 16


LARGEST_BIAS = 2.0**30
_SMALL_BIAS = 2.0**20
