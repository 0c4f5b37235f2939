"""The float network as layers that the array or its core can do, before any scale is chosen.

Tensors go by their float names; shapes have batch 1. Weights are float64, so that scaling and sorting lose nothing.
Steps of the program that have no weights and no scales (`MaxPool`, `Concat`, `Float`) are layers as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.program import (
    Concat,
    Float,
    MaxPool,
    Pads,
    Pair,
    Unary,
    is_depthwise,
    step_inputs,
    step_outputs,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ConvLayer(Unary):
    """weights [O, I / groups, kh, kw], bias [O]; `relu`: a Relu was folded in; `input_offset`: steps that the tensor it
    reads is stored less (`offset`). Other fields as in `program.Conv`."""

    weights: Floats
    bias: Floats
    groups: int
    strides: Pair
    dilations: Pair
    pads: Pads
    relu: bool = False
    sources: tuple[str, ...] = ()
    input_offset: int = 0

    @property
    def depthwise(self) -> bool:
        """Whether each output channel reads one input channel of its own."""
        return is_depthwise(self.groups, self.weights.shape)


@dataclass(frozen=True)
class FcLayer(Unary):
    """weights [O, K], bias [O]; `input_offset` as in `ConvLayer`."""

    weights: Floats
    bias: Floats
    relu: bool = False
    sources: tuple[str, ...] = ()
    input_offset: int = 0


@dataclass(frozen=True)
class AddLayer:
    """The sum of two tensors of one shape."""

    name: str
    left: str
    right: str
    output: str
    relu: bool = False
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class AverageLayer(Unary):
    """Average pooling; attributes as in `program.AveragePool`."""

    kernel: Pair
    strides: Pair
    pads: Pads
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClampLayer(Unary):
    """min(max(x, low), high); infinities where a side is open."""

    low: float
    high: float
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MoveLayer(Unary):
    """The same values in other places; see `program.Rearrange`. `model` is the node on float32 tensors."""

    index: NDArray[np.int32] | None
    model: ir.Model
    sources: tuple[str, ...] = ()


Layer = ConvLayer | FcLayer | AddLayer | MaxPool | AverageLayer | ClampLayer | Concat | MoveLayer | Float
SAME_SCALE = (MaxPool, ClampLayer, Concat, MoveLayer)
"""Layers that pass integers on: their inputs and outputs share one scale."""


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
    """Names of the tensors that a layer reads."""
    if isinstance(layer, AddLayer):
        return layer.left, layer.right
    return step_inputs(layer) if isinstance(layer, MaxPool | Concat | Float) else (layer.input,)


def layer_outputs(layer: Layer) -> tuple[str, ...]:
    """Names of the tensors that a layer makes."""
    return step_outputs(layer) if isinstance(layer, Float) else (layer.output,)


def readers(layers: Iterable[Layer]) -> Mapping[str, list[Layer]]:
    """Tensor → those of the layers that read it, in order; none of what nothing reads."""
    found: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        for name in dict.fromkeys(layer_inputs(layer)):
            found[name].append(layer)
    return found


def integer_tensors(network: Network) -> set[str]:
    """Tensors that exist as integers: read or written by a layer that is not in float."""
    return {
        name
        for layer in network.layers
        if not isinstance(layer, Float)
        for name in (*layer_inputs(layer), *layer_outputs(layer))
    }
