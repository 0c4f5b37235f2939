"""Scaling channels of a tensor and taking the scaling back in the weights of whoever reads it, in an ONNX graph.

If every channel c of a tensor is divided by k[c] where it is made and the weights that read channel c are multiplied
by k[c], the network computes what it did. In integers it does not: one scale for a tensor suits channels of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.tune.recover.layers import Floats, Layer
from edgeq.tune.recover.uses import uses


class Weights:
    """The constants of a model, to be read and replaced in place."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._uses = uses(model)

    def array(self, name: str) -> NDArray[Any]:
        return numpy_helper.to_array(self._constants[name])

    def alone(self, *names: str) -> bool:
        """Whether each of these constants ("" for none) is read once only."""
        return all(self._uses[name] <= 1 for name in names if name)

    def replace(self, name: str, values: NDArray[Any]) -> None:
        """Other values of the same type."""
        old = self._constants[name]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(old.data_type)
        old.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, dtype), name))

    def add(self, name: str, values: NDArray[Any]) -> str:
        """A new constant, float32; the name that it got."""
        while name in self._constants:
            name += "_"
        tensor = numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name)
        self._model.graph.initializer.append(tensor)
        self._constants[name] = self._model.graph.initializer[-1]
        self._uses[name] += 1
        return name

    def scaled_outputs(self, layer: Layer, factor: Floats) -> tuple[Floats, Floats | None]:
        """(weight, bias) of a layer with output channels multiplied by `factor` [outputs]."""
        rows = layer.rows(self.array(layer.weight).astype(np.float64))
        weight = layer.unrows(rows * factor.reshape(layer.groups, -1, 1))
        # A Gemm may add one number to all outputs.
        bias = self.array(layer.bias).astype(np.float64).ravel() * factor if layer.bias else None
        return weight, bias

    def scale_inputs(self, layer: Layer, factor: Floats) -> None:
        """Multiply what a layer makes of its input channels by `factor` [input channels]."""
        self.replace(layer.weight, layer.unrows(self._taps(layer) * spread_over_taps(layer, factor)))

    def input_importance(self, layer: Layer) -> Floats:
        """float64 [input channels]: sum of the squared weights that read each channel."""
        squares = (self._taps(layer) ** 2).sum(1)
        return np.asarray(squares.reshape(input_channels(layer), -1).sum(1), np.float64)

    def _taps(self, layer: Layer) -> Floats:
        return np.asarray(layer.rows(self.array(layer.weight).astype(np.float64)), np.float64)


def input_channels(layer: Layer) -> int:
    """Channels of the tensor that a layer reads, over all groups."""
    return layer.groups * layer.shape[1] if layer.op_type == "Conv" else layer.taps


def spread_over_taps(layer: Layer, factor: Floats) -> Floats:
    """Factors [input channels] as [groups, 1, taps]."""
    repeats = layer.taps * layer.groups // input_channels(layer)
    return np.asarray(np.repeat(factor, repeats).reshape(layer.groups, 1, layer.taps), np.float64)


def only_layers(nodes: Sequence[onnx.NodeProto], tensor: str, layers: dict[str, Layer]) -> list[Layer] | None:
    """The layers that these nodes are, if all are layers that read `tensor` as their data; else None."""
    found = [layers.get(node.name) for node in nodes]
    if not found or any(layer is None or layer.source != tensor for layer in found):
        return None
    return [layer for layer in found if layer is not None]
