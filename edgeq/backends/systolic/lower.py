"""Lower a float network, with its scales, to the integer program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.offsets import OFFSET
from edgeq.backends.systolic.program import Layer, Network, Program, Step, Tile, Weighted, step_inputs, step_outputs
from edgeq.backends.systolic.recognise import Windows
from edgeq.model.convert import from_bytes, to_bytes
from edgeq.model.edit import drop_unused_initializers
from edgeq.model.quant_params import QuantParams

# The hardware's instruction has two bits each for window, stride and padding, and eight bits for output sizes.
_FIELD = 3
_SIDE = 255


def direct(layer: steps.Conv, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the array's own convolution call computes a layer. Such a layer has one group, no dilation, and
    square windows and images.

    Other layers become im2col and a product, with the same results.
    """
    _, _, rows, columns = shapes[layer.input]
    _, _, out_rows, out_columns = shapes[layer.output]
    windows = Windows((layer.weights.shape[2], layer.weights.shape[3]), layer.strides, layer.dilations, layer.pads)
    return layer.groups == 1 and rows == columns and out_rows == out_columns and windows.regular


def fusable(layer: steps.Conv, following: Layer, shapes: Mapping[str, tuple[int, ...]]) -> steps.Pool | None:
    """Return the pooling to fuse into the convolution `layer`; None if the array cannot fuse it.

    The caller ensures that `following` is the only reader of the convolution.
    """
    if not isinstance(following, steps.MaxPool) or not direct(layer, shapes):
        return None
    kernel, strides, pads = following.kernel, following.strides, following.pads
    if not Windows(kernel, strides, following.dilations, pads).regular or max(kernel[0], strides[0], pads[0]) > _FIELD:
        return None
    if max(shapes[following.output][2:]) > _SIDE or max(shapes[layer.output][2:]) > _SIDE:
        return None
    # The array pads with 0. In a window of negative values, that 0 would be the maximum.
    if pads[0] and not layer.relu:
        return None
    return steps.Pool(kernel[0], strides[0], pads[0])


def lower(
    name: str,
    network: Network,
    scales: Mapping[str, float],
    array: ArrayConfig,
    *,
    depthwise_tile: int | None = None,
) -> Program:
    """Lower a network: quantize weights, add conversions between integers and floats, and drop clamps that the scales
    imply.

    Args:
        scales: the scale of every integer tensor (`scales.activation_scales`).
        depthwise_tile: number of channels of a depthwise layer that share a scale; None means the array's dim. With 1,
            depthwise layers run on the core.
    """
    network = _without_idle_clamps(network, scales)
    work = _Lowering(network, scales, array, depthwise_tile or array.dim)
    for layer in network.layers:
        work.add(layer)
    for output in network.outputs:
        work.as_float(output)
    return Program(name, array, network.inputs, network.outputs, dict(work.tensors), tuple(work.steps))


class _Lowering:
    """Hold the steps and tensors lowered so far."""

    def __init__(self, network: Network, scales: Mapping[str, float], array: ArrayConfig, depthwise_tile: int) -> None:
        self.steps: list[Step] = []
        self.tensors: dict[str, steps.Tensor] = {}
        self._network, self._scales, self._array, self._depthwise_tile = network, scales, array, depthwise_tile
        self._integers: dict[str, str] = {}
        # An integer tensor must not get the name of a float one.
        self._names = set(network.shapes)
        self._readers = network.readers
        self._fused: set[str] = set()
        for name in network.inputs:
            self._float_tensor(name)

    def add(self, layer: Layer) -> None:
        """Append the steps of a layer, unless it was fused into an earlier layer."""
        if layer.name in self._fused:
            return
        if not isinstance(layer, steps.Float):
            self.steps.append(self._lowered(layer, [self.as_integer(name) for name in step_inputs(layer)]))
            return
        for name in layer.inputs:
            self.as_float(name)
        for name in layer.outputs:
            self._float_tensor(name)
        self.steps.append(layer)

    def as_float(self, name: str) -> str:
        """Return the name of a tensor's float form. If there is no float form yet, add a Dequantize that makes it."""
        if name not in self.tensors:
            self._float_tensor(name)
            self.steps.append(steps.Dequantize(f"{name}_DequantizeLinear", self._integers[name], name))
        return name

    def as_integer(self, name: str) -> str:
        """Return the name of a tensor's int8 form. If there is no int8 form yet, add a Quantize that makes it."""
        if name not in self._integers:
            self.steps.append(steps.Quantize(f"{name}_QuantizeLinear", name, self._integer_tensor(name)))
        return self._integers[name]

    def _float_tensor(self, name: str) -> None:
        self.tensors[name] = steps.Tensor(name, self._network.shapes[name], self._network.dtypes[name], None, name)

    def _integer_tensor(self, name: str) -> str:
        integer_name = f"{name}_quantized"
        while integer_name in self._names:
            integer_name += "_"
        self._names.add(integer_name)
        self._integers[name] = integer_name
        shape, channels = self._network.shapes[name], self._network.channels.get(name)
        self.tensors[integer_name] = steps.Tensor(integer_name, shape, "int8", self._scales[name], name, channels)
        return integer_name

    def _lowered(self, layer: Layer, inputs: Sequence[str]) -> Step:
        """Return a layer as a step that reads the integer tensors `inputs`."""
        output = step_outputs(layer)[0]
        changes: dict[str, Any] = {"input": inputs[0]}
        match layer:
            case steps.Conv():
                changes |= self._weights(layer) | {"conv_shape": self._network.shapes[output]}
                following = self._readers[output]
                # A fused convolution does not store its own result, so nothing else may need it.
                alone = len(following) == 1 and output not in self._network.outputs
                pool = fusable(layer, following[0], self._network.shapes) if alone else None
                if pool is not None:
                    pooling = following[0]
                    self._fused.add(pooling.name)
                    output = step_outputs(pooling)[0]
                    changes |= {"pool": pool, "sources": (*layer.sources, *pooling.sources)}
            case steps.Fc():
                changes |= self._weights(layer)
            case steps.ResidualAdd():
                # All factors are computed in float32, as in the formulas of `program`, so that no translation differs
                # in the last bit.
                to = np.float32(self._scales[output])
                left_multiplier, right_multiplier = (
                    float(np.float32(self._scales[n]) / to) for n in (layer.left, layer.right)
                )
                changes = {
                    "left": inputs[0],
                    "right": inputs[1],
                    "left_multiplier": left_multiplier,
                    "right_multiplier": right_multiplier,
                }
            case steps.AveragePool():
                # The same roundings as in the reference model, whose weight scale is 1 / window in float32.
                share = np.float32(1 / (layer.kernel[0] * layer.kernel[1]))
                step = np.float32(np.float32(self._scales[layer.input]) * share)
                changes["multiplier"] = float(step / np.float32(self._scales[output]))
            case steps.Clamp():
                changes["low"], changes["high"] = clamp_integers(layer, self._scales[output])
            case steps.Concat():
                changes = {"inputs": tuple(inputs)}
        changes["output"] = self._integer_tensor(output)
        if isinstance(layer, steps.Rearrange):
            changes["model"] = _on_integers(layer.model, inputs[0], changes["output"])
        return replace(layer, **changes)

    def _weights(self, layer: Weighted) -> dict[str, Any]:
        """Return the fields of a layer that contain integer weights, biases and multipliers."""
        weights, bias, tiles = quantize_weights(
            layer.weights,
            layer.bias,
            input_scale=self._scales[layer.input],
            output_scale=self._scales[layer.output],
            dim=self._tile_width(layer),
            powers_of_two=self._array.output_scale == "shift",
        )
        # The input is stored minus 128 steps, so each weight adds 128 of its own size to the sum.
        if layer.input in self._network.shifted:
            bias = bias + np.int32(OFFSET) * weights.reshape(len(bias), -1).sum(axis=1, dtype=np.int32)
        return {"weights": weights, "bias": bias, "tiles": tiles}

    def _tile_width(self, layer: Weighted) -> int:
        """Return the minimum number of channels that share a scale.

        All channels of a grouped convolution share one scale, because tiles would cut through its groups.
        """
        if isinstance(layer, steps.Fc) or layer.groups == 1:
            return self._array.dim
        return self._depthwise_tile if layer.depthwise else len(layer.bias)


def _on_integers(content: bytes, source: str, target: str) -> bytes:
    """Change a part that moves float values so that it moves int8 values and pads with 0. Return the changed part.

    Args:
        source, target: new names of the part's input and output.
    """
    part = from_bytes(content)
    graph = part.graph
    for node in graph:
        if node.op_type == "Pad":
            # The float filler goes: without it, Pad fills with 0, which is the zero point.
            node.resize_inputs(min(len(node.inputs), 2))
    drop_unused_initializers(graph)
    for value, name in ((graph.inputs[0], source), (graph.outputs[0], target)):
        value.name, value.type = name, ir.TensorType(ir.DataType.INT8)
    return to_bytes(part)


def clamp_integers(layer: steps.Clamp, scale: float) -> tuple[int, int]:
    """Return the integers nearest to a clamp's bounds."""
    low, high = (int(np.clip(np.rint(bound / scale), steps.LEAST, steps.LARGEST)) for bound in (layer.low, layer.high))
    return low, high


def _without_idle_clamps(network: Network, scales: Mapping[str, float]) -> Network:
    """Remove clamps after layers that already saturate at the same bounds. A clamp from 0 becomes the relu of the layer
    before it.

    The results may differ by one step, because a layer saturates at -128 and a clamp may stop at -127.
    """
    readers = network.readers
    makers: dict[str, Layer] = {name: layer for layer in network.layers for name in step_outputs(layer)}
    replaced: dict[str, Layer] = {}
    gone: set[str] = set()
    for layer in network.layers:
        if not isinstance(layer, steps.Clamp):
            continue
        low, high = clamp_integers(layer, scales[layer.output])
        maker = makers.get(layer.input)
        if maker is not None:
            maker = replaced.get(maker.name, maker)
        # Only these layers saturate, and a tensor with other readers must not be clamped for them.
        if not isinstance(maker, steps.Conv | steps.Fc | steps.ResidualAdd) or len(readers[layer.input]) > 1:
            continue
        if layer.input in network.outputs or high < steps.LARGEST or steps.LEAST + 1 < low < 0:
            continue
        sources = (*maker.sources, *layer.sources)
        replaced[maker.name] = replace(maker, output=layer.output, relu=maker.relu or low == 0, sources=sources)
        gone.add(layer.name)
    layers = tuple(replaced.get(layer.name, layer) for layer in network.layers if layer.name not in gone)
    return replace(network, layers=layers)


# Neighbouring tiles share one scale if their scales differ by less than this factor. With separate scales, the runtime
# that runs the dialect file would need one more convolution call, for a gain of only a twentieth of a bit.
_MERGE_FACTOR = 1.05
# How far rounding to float32 may move a weight from a whole number of grid steps.
_ON_GRID = 1e-3
# Number of weights that is enough to rule out most grids.
_PROBED = 16
# Half of the int32 range, so the products have room before the sum wraps.
LARGEST_BIAS = 2.0**30
# If all weights are zero, the bias alone sets the scale. This bounds its integer.
_SMALL_BIAS = 2.0**20


def quantize_weights(
    weights: steps.Floats,
    bias: steps.Floats,
    *,
    input_scale: float,
    output_scale: float,
    dim: int,
    powers_of_two: bool,
) -> tuple[steps.Int8s, steps.Int32s, tuple[Tile, ...]]:
    """Quantize weights [O, ...] symmetrically to -127..127, and the bias to int32. The scale of the bias is input scale
    · weight scale.

    Args:
        dim: number of channels in a tile.
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
            # Rounded up, so that no weight leaves the range.
            scale = float(2.0 ** math.ceil(math.log2(scale)))
        product = np.float32(np.float32(input_scale) * np.float32(scale))
        tiles.append(Tile(start, stop, float(np.float32(scale)), float(np.float32(product / np.float32(output_scale)))))
    scales = np.repeat([t.weight_scale for t in tiles], [t.stop - t.start for t in tiles])
    zeros = np.zeros(outputs, np.int64)
    units = (np.float32(input_scale) * scales.astype(np.float32)).astype(np.float64)
    integers = QuantParams(scales, zeros, ir.DataType.INT8, narrow=True).quantize(rows)
    biases = QuantParams(units, zeros, ir.DataType.INT32).quantize(bias)
    return integers.reshape(weights.shape), biases, tuple(tiles)


def _scale(rows: steps.Floats, bias: steps.Floats, input_scale: float) -> float:
    """Return the scale of one tile. If the weights are tiny compared to the bias, the scale is chosen so that the bias
    fits int32.
    """
    largest = _grid(rows) or float(np.abs(rows).max(initial=0.0)) / steps.LARGEST
    offset = float(np.abs(bias).max(initial=0.0)) / input_scale
    smallest = offset / (LARGEST_BIAS if largest else _SMALL_BIAS)
    # A tile of zeros may have any scale.
    return float(np.float32(max(largest, smallest))) or 1.0


def _grid(rows: steps.Floats) -> float:
    """Return the step of a grid of at most 127 steps that contains all values; 0 if there is no such grid.

    Weights that were already quantized are on such a grid.
    """
    flat = rows.ravel()
    largest = float(np.abs(flat).max(initial=0.0))
    if not largest:
        return 0.0
    for count in range(steps.LARGEST, 0, -1):
        places = flat[:_PROBED] * (count / largest)
        if np.abs(places - np.rint(places)).max() > _ON_GRID:
            continue
        places = flat * (count / largest)
        if np.abs(places - np.rint(places)).max() <= _ON_GRID:
            return largest / count
    return 0.0


def _merged(limits: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    merged = [limits[0]]
    for start, stop, scale in limits[1:]:
        merged_start, _, merged_scale = merged[-1]
        if max(scale, merged_scale) < _MERGE_FACTOR * min(scale, merged_scale):
            merged[-1] = (merged_start, stop, max(scale, merged_scale))
        else:
            merged.append((start, stop, scale))
    return merged
