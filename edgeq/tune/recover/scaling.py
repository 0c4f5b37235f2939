"""Scaling the channels of a tensor, undone in the weights of the layers that read it.

If every channel c of a tensor is divided by k[c] by the layer that computes it and the weights that read channel c are
multiplied by k[c], the network computes the same. In integers it does not: one scale for a tensor suits channels of one
magnitude.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from edgeq.graph.edit import set_constant
from edgeq.graph.query import read_count
from edgeq.tune.recover.layers import Floats, Layer


class Weights:
    """The weights of a model's layers, read and changed in place: give it a model that may be edited."""

    def __init__(self, model: ir.Model) -> None:
        self._initializers = model.graph.initializers

    def array(self, name: str) -> Floats:
        """The values of an initializer, as float64 of its shape."""
        tensor = self._initializers[name].const_value
        assert tensor is not None
        return np.asarray(tensor.numpy(), np.float64)

    def alone(self, *names: str) -> bool:
        """Whether each of these initializers ("" for none) is read once only."""
        return all(read_count(self._initializers[name]) <= 1 for name in names if name)

    def replace(self, name: str, values: Floats) -> None:
        """Give an initializer other values; its element type stays."""
        set_constant(self._initializers[name], values)

    def scaled_outputs(self, layer: Layer, factor: Floats) -> tuple[Floats, Floats | None]:
        """(weight, bias) of a layer with output channels multiplied by `factor` [outputs]."""
        weight = layer.unrows(self.rows(layer) * factor.reshape(layer.groups, -1, 1))
        # A Gemm may add one number to all outputs.
        bias = self.array(layer.bias).ravel() * factor if layer.bias else None
        return weight, bias

    def scale_inputs(self, layer: Layer, factor: Floats) -> None:
        """Multiply the weights that read each input channel by `factor` [input channels]."""
        self.replace(layer.weight, layer.unrows(self.rows(layer) * spread_over_taps(layer, factor)))

    def input_importance(self, layer: Layer) -> Floats:
        """float64 [input channels]: sum of the squared weights that read each channel."""
        squares = (self.rows(layer) ** 2).sum(1)
        return np.asarray(squares.reshape(input_channels(layer), -1).sum(1), np.float64)

    def rows(self, layer: Layer) -> Floats:
        """The weights as float64 [groups, outputs per group, taps]."""
        return np.asarray(layer.rows(self.array(layer.weight)), np.float64)


def input_channels(layer: Layer) -> int:
    """Channels of the tensor that a layer reads, over all groups."""
    return layer.groups * layer.shape[1] if layer.op_type == "Conv" else layer.taps


def spread_over_taps(layer: Layer, factor: Floats) -> Floats:
    """Factors [input channels] as [groups, 1, taps]."""
    repeats = layer.taps * layer.groups // input_channels(layer)
    return np.asarray(np.repeat(factor, repeats).reshape(layer.groups, 1, layer.taps), np.float64)


def only_layers(nodes: Iterable[ir.Node], tensor: str, maker: Layer, layers: Mapping[str, Layer]) -> tuple[Layer, ...]:
    """The layers of these nodes, if each is a layer that reads `tensor` as its data, with the channels on the axis on
    which `maker` computes them; else none.

    Args:
        layers: of the model, by name.
    """
    found = [layers.get(node.name or "") for node in nodes]
    same = [layer for layer in found if layer is not None and layer.source == tensor and _same_axis(layer, maker)]
    return tuple(same) if len(same) == len(found) else ()


def _same_axis(reader: Layer, maker: Layer) -> bool:
    """A Conv has its channels on the second axis, the others on the last."""
    return (reader.op_type == "Conv") == (maker.op_type == "Conv") and input_channels(reader) == maker.outputs
