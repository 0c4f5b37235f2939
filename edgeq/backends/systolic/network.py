"""The float network as layers that the array or its core can do, before any scale is chosen.

Tensors go by their float names; shapes have batch 1. Weights are float64, so that scaling and sorting cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[int, int]
Pads = tuple[int, int, int, int]


@dataclass(frozen=True)
class ConvLayer:
    """weights [O, I / groups, kh, kw], bias [O]; `relu`: a Relu was folded in. Others as in `program.Conv`."""

    name: str
    input: str
    output: str
    weights: Floats
    bias: Floats
    groups: int
    strides: Pair
    dilations: Pair
    pads: Pads
    relu: bool = False
    sources: tuple[str, ...] = ()

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.weights.shape[0] and self.weights.shape[1] == 1


@dataclass(frozen=True)
class FcLayer:
    """weights [O, K], bias [O]."""

    name: str
    input: str
    output: str
    weights: Floats
    bias: Floats
    relu: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class AddLayer:
    name: str
    left: str
    right: str
    output: str
    relu: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaxPoolLayer:
    name: str
    input: str
    output: str
    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: Pads
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class AverageLayer:
    name: str
    input: str
    output: str
    kernel: Pair
    strides: Pair
    pads: Pads
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClampLayer:
    """min(max(x, low), high); infinities where a side is open."""

    name: str
    input: str
    output: str
    low: float
    high: float
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConcatLayer:
    name: str
    inputs: tuple[str, ...]
    output: str
    axis: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MoveLayer:
    """The same numbers in other places; see `program.Rearrange`."""

    name: str
    input: str
    output: str
    index: NDArray[np.int32] | None
    model: bytes
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class FloatLayer:
    """Nodes that stay in float, as an ONNX model; reasons by node name."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: bytes
    reasons: Mapping[str, str]
    sources: tuple[str, ...] = ()


Layer = ConvLayer | FcLayer | AddLayer | MaxPoolLayer | AverageLayer | ClampLayer | ConcatLayer | MoveLayer | FloatLayer
SAME_SCALE = (MaxPoolLayer, ClampLayer, ConcatLayer, MoveLayer)
"""Layers that hand integers on: their inputs and outputs share one scale."""


@dataclass(frozen=True)
class Network:
    """Layers in an order in which they can run.

    Attributes:
        inputs, outputs: of the model.
        shapes: of every tensor, batch 1.
        dtypes: numpy names, of every tensor.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]


def layer_inputs(layer: Layer) -> tuple[str, ...]:
    if isinstance(layer, AddLayer):
        return layer.left, layer.right
    if isinstance(layer, ConcatLayer | FloatLayer):
        return layer.inputs
    return (layer.input,)


def layer_outputs(layer: Layer) -> tuple[str, ...]:
    return layer.outputs if isinstance(layer, FloatLayer) else (layer.output,)


def readers(network: Network) -> dict[str, list[Layer]]:
    """Tensor → the layers that read it, in order."""
    found: dict[str, list[Layer]] = {name: [] for name in network.shapes}
    for layer in network.layers:
        for name in dict.fromkeys(layer_inputs(layer)):
            found[name].append(layer)
    return found


def integer_tensors(network: Network) -> set[str]:
    """Tensors that exist as integers: read or written by a layer that is not in float."""
    return {
        name
        for layer in network.layers
        if not isinstance(layer, FloatLayer)
        for name in (*layer_inputs(layer), *layer_outputs(layer))
    }
