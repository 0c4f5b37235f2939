"""Read and change layers with constant weights in the float model.

**Layers.** A layer is described as one matrix product for each group of channels: weights times patches of the input.
Conv, Gemm and MatMul all compute, at every position,

    y[g, m] = sum_k W[g, m, k] x[g, k] + b[g, m]

Here x[g] is the part of the input that one output position reads. For a Conv, it is the group's channels times the
kernel. For Gemm and MatMul, it is one row.

**Scaled channels.** The channels of a tensor can be scaled if the layers that read it undo the scaling. If the layer
that computes the tensor divides every channel c by k[c], and the weights that read channel c are multiplied by k[c],
the network computes the same in floats. In integers it does not, because one scale for a tensor suits only channels of
one magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgeq.model.edit import set_constant
from edgeq.model.graph import (
    attributes,
    is_op,
    name_of,
    node_input,
    read_count,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WeightedLayer:
    """Describe a node with constant weights.

    Attributes:
        name, op_type: name and operator of the node.
        source, output: the tensors that it reads and computes.
        weight, bias: names of initializers; `bias` is "" if there is none.
        shape: shape of the weight.
        groups: groups of a grouped Conv; 1 for all other layers.
        transposed: whether the weight is stored as [k, m] (MatMul, and Gemm without transB).
        attributes: attributes of the node, from `edgeq.model.graph.attributes`.
    """

    name: str
    op_type: str
    source: str
    output: str
    weight: str
    bias: str
    shape: tuple[int, ...]
    groups: int
    transposed: bool
    attributes: Mapping[str, Any]

    @property
    def outputs(self) -> int:
        """Return the number of output channels, over all groups."""
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def taps(self) -> int:
        """Return the length k of one patch."""
        return self.shape[0] if self.transposed else math.prod(self.shape[1:])

    @property
    def channel_axis(self) -> int:
        """Return the index of the channel axis of the output."""
        return 1 if self.op_type == "Conv" else -1

    def rows(self, weight: NDArray[Any]) -> NDArray[Any]:
        """Return `weight` reshaped to [groups, outputs per group, taps]."""
        flat = weight.T if self.transposed else weight
        return flat.reshape(self.groups, self.outputs // self.groups, self.taps)

    def unrows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return weights, given as [groups, outputs per group, taps], in the shape in which the layer stores them."""
        flat = rows.reshape(self.outputs, self.taps)
        return np.ascontiguousarray(flat.T) if self.transposed else flat.reshape(self.shape)

    def patches(self, values: NDArray[Any], limit: int, random: np.random.Generator) -> NDArray[np.float32]:
        """Return the patches of an input tensor: the values that the layer's output positions read.

        Args:
            values: the tensor `source`, with its batch axis.
            limit: largest number of positions. If the layer has more, this number of them is drawn at random.

        Returns:
            float32 [groups, positions, taps].
        """
        if self.op_type == "Conv":
            return self._windows(values, limit, random)
        table = values.reshape(-1, values.shape[-1])
        # Figures over positions change little with more of them, but time and memory grow.
        if len(table) > limit:
            table = table[random.choice(len(table), limit, replace=False)]
        return table[None].astype(np.float32)

    def _windows(self, values: NDArray[Any], limit: int, random: np.random.Generator) -> NDArray[np.float32]:
        kernel = self.shape[2:]
        strides, dilations, pads = conv_geometry(self.attributes, kernel, values.shape[2:])
        reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True))
        padded = np.pad(values, [(0, 0), (0, 0), *pads]) if np.any(pads) else values
        windows = sliding_window_view(padded, reach, tuple(range(2, values.ndim)))
        # The view has one window per pixel. Strides choose among the positions, dilations among the taps of a window.
        every: tuple[Any, ...] = tuple(slice(None, None, step) for step in (*strides, *dilations))
        windows = windows[(..., *every)]
        windows = np.moveaxis(windows, 1, len(kernel) + 1)  # [batch, positions..., channels, kernel...]
        positions = windows.shape[: len(kernel) + 1]
        total = math.prod(positions)
        picks = np.arange(total) if total <= limit else random.choice(total, limit, replace=False)
        patches = windows[np.unravel_index(picks, positions)].reshape(len(picks), self.groups, self.taps)
        return np.ascontiguousarray(patches.transpose(1, 0, 2), np.float32)


def conv_geometry(
    attributes: Mapping[str, Any], kernel: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Return (strides, dilations, padding before and after each axis) of a Conv on an input of these spatial sizes.

    Padding by auto_pad follows the definition of ONNX's Conv: SAME keeps ceil(size / stride) outputs. If the padding is
    odd, the larger part goes to the end (UPPER) or the beginning (LOWER).
    """
    dims = len(kernel)
    strides = list(attributes.get("strides", [1] * dims))
    dilations = list(attributes.get("dilations", [1] * dims))
    auto = attributes.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            padding = max(0, (math.ceil(size / s) - 1) * s + d * (k - 1) + 1 - size)
            less, more = padding // 2, padding - padding // 2
            pads.append((less, more) if auto == "SAME_UPPER" else (more, less))
        return strides, dilations, pads
    flat = list(attributes.get("pads", [0] * 2 * dims)) if auto == "NOTSET" else [0] * 2 * dims
    return strides, dilations, list(zip(flat[:dims], flat[dims:], strict=True))


def find_layers(model: ir.Model) -> tuple[WeightedLayer, ...]:
    """Return the main graph's layers with constant float weights, in the order of the graph.

    A Gemm is left out if it has transA, alpha or beta, or a bias that differs from row to row. A MatMul is left out if
    its weight is not a matrix.
    """
    layers = (_read_layer(node) for node in model.graph if is_op(node, "Conv", "Gemm", "MatMul"))
    return tuple(layer for layer in layers if layer is not None)


def _read_layer(node: ir.Node) -> WeightedLayer | None:
    source, weight, bias = (node_input(node, place) for place in range(3))
    matrix = initializer(weight)
    if source is None or source.is_initializer() or matrix is None or matrix.dtype != ir.DataType.FLOAT:
        return None
    options = attributes(node)
    # Gemm's own factors would have to be part of every formula for layers.
    unscaled = not options.get("transA") and options.get("alpha", 1.0) == options.get("beta", 1.0) == 1.0
    shape = tuple(matrix.shape.numpy())
    if not unscaled or (node.op_type != "Conv" and len(shape) != 2):
        return None
    added = initializer(bias)
    # A bias that is computed at run time can be neither scaled nor corrected.
    if bias is not None and added is None:
        return None
    layer = WeightedLayer(
        node.name or "",
        node.op_type,
        name_of(source),
        name_of(node.outputs[0]),
        name_of(weight),
        name_of(bias),
        shape,
        options.get("group", 1),
        node.op_type == "MatMul" or (node.op_type == "Gemm" and not options.get("transB")),
        options,
    )
    return layer if added is None or _is_per_output(added.shape.numpy(), layer.outputs) else None


def initializer(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that no graph input can override; None for any other value."""
    return value.const_value if value is not None and value.is_initializer() and not value.is_graph_input() else None


def _is_per_output(shape: Sequence[int], outputs: int) -> bool:
    """Return whether a bias of this shape has one number for each output, or one number for all outputs."""
    return math.prod(shape) == 1 or (math.prod(shape) == outputs and shape[-1] == outputs)


class Weights:
    """Read and change the weights of a model's layers, in place. Pass a model that may be edited."""

    def __init__(self, model: ir.Model) -> None:
        self._initializers = model.graph.initializers

    def array(self, name: str) -> Floats:
        """Return the values of an initializer, as float64 in its own shape."""
        tensor = self._initializers[name].const_value
        assert tensor is not None
        return np.asarray(tensor.numpy(), np.float64)

    def are_read_once(self, *names: str) -> bool:
        """Return whether each of these initializers is read only once. The name "" is ignored."""
        return all(read_count(self._initializers[name]) <= 1 for name in names if name)

    def replace(self, name: str, values: Floats) -> None:
        """Replace the values of an initializer. Its element type does not change."""
        set_constant(self._initializers[name], values)

    def scaled_outputs(self, layer: WeightedLayer, factor: Floats) -> tuple[Floats, Floats | None]:
        """Return (weight, bias) of a layer with output channels multiplied by `factor` [outputs]."""
        weight = layer.unrows(self.rows(layer) * factor.reshape(layer.groups, -1, 1))
        # A Gemm may add one number to all outputs.
        bias = self.array(layer.bias).ravel() * factor if layer.bias else None
        return weight, bias

    def scale_inputs(self, layer: WeightedLayer, factor: Floats) -> None:
        """Multiply the weights that read each input channel by `factor` [input channels]."""
        self.replace(layer.weight, layer.unrows(self.rows(layer) * spread_over_taps(layer, factor)))

    def input_importance(self, layer: WeightedLayer) -> Floats:
        """Return float64 [input channels]: for each channel, the sum of the squared weights that read it."""
        squares = (self.rows(layer) ** 2).sum(1)
        return np.asarray(squares.reshape(input_channels(layer), -1).sum(1), np.float64)

    def rows(self, layer: WeightedLayer) -> Floats:
        """Return the weights as float64 [groups, outputs per group, taps]."""
        return np.asarray(layer.rows(self.array(layer.weight)), np.float64)


def input_channels(layer: WeightedLayer) -> int:
    """Return the number of channels of the tensor that a layer reads, over all groups."""
    return layer.groups * layer.shape[1] if layer.op_type == "Conv" else layer.taps


def spread_over_taps(layer: WeightedLayer, factor: Floats) -> Floats:
    """Return factors [input channels] as [groups, 1, taps]."""
    # In a Conv, each channel has one tap for each position of the kernel, and these taps are neighbours.
    repeats = layer.taps * layer.groups // input_channels(layer)
    return np.asarray(np.repeat(factor, repeats).reshape(layer.groups, 1, layer.taps), np.float64)


def only_layers(
    nodes: Iterable[ir.Node], tensor: str, maker: WeightedLayer, layers: Mapping[str, WeightedLayer]
) -> tuple[WeightedLayer, ...]:
    """Return the layers of these nodes, or no layers if one of the nodes does not qualify. To qualify, a node must be a
    layer that reads `tensor` as its data, with the channels on the same axis on which `maker` computes them.

    Args:
        layers: layers of the model, by name.
    """
    candidates = [layers.get(node.name or "") for node in nodes]
    matches = [
        layer for layer in candidates if layer is not None and layer.source == tensor and _has_same_axis(layer, maker)
    ]
    return tuple(matches) if len(matches) == len(candidates) else ()


def _has_same_axis(reader: WeightedLayer, maker: WeightedLayer) -> bool:
    """Return whether two layers have the same channels on the same axis: the second axis for a Conv, the last for
    others.
    """
    return (reader.op_type == "Conv") == (maker.op_type == "Conv") and input_channels(reader) == maker.outputs
