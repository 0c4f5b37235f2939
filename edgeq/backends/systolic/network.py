"""The float network as layers that the array or its core can do, before any scale is chosen.

Tensors go by their float names; shapes have batch 1. Weights are float64, so that scaling and sorting lose nothing.
Steps of the program that have no weights and no scales (`MaxPool`, `Concat`, `Float`) are layers as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
from edgeq.model.graph import name_of, reads

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


_Item = TypeVar("_Item")


def alternate(layers: Sequence[Layer], floats: Sequence[ir.Node]) -> list[Layer | list[ir.Node]]:
    """All layers one by one, float nodes in groups as large as dependences allow.

    Greedy: everything of one kind that can run does before the kind changes. Both kinds are tried as the first; the
    order with fewer groups wins.
    """
    made = {name for layer in layers for name in layer_outputs(layer)}
    made |= {name for node in floats for name in _writes(node)}
    orders = [_greedy(layers, floats, made, first) for first in (0, 1)]
    return min(orders, key=lambda order: sum(isinstance(item, list) for item in order))


def _reads(node: ir.Node) -> list[str]:
    return [name_of(value) for value in reads(node)]


def _writes(node: ir.Node) -> list[str]:
    return [value.name for value in node.outputs if value.name]


def _greedy(
    layers: Sequence[Layer], floats: Sequence[ir.Node], made: set[str], first: int
) -> list[Layer | list[ir.Node]]:
    known: set[str] = set()
    waiting: tuple[list[Layer], list[ir.Node]] = (list(layers), list(floats))
    order: list[Layer | list[ir.Node]] = []
    kind = first
    while waiting[0] or waiting[1]:
        if kind == 0:
            done = _run(waiting[0], known, made, layer_inputs, layer_outputs)
            order.extend(done)
        else:
            group = _run(waiting[1], known, made, _reads, _writes)
            if group:
                order.append(group)
        kind = 1 - kind
    return order


def _run(
    waiting: list[_Item],
    known: set[str],
    made: set[str],
    read: Callable[[_Item], Sequence[str]],
    written: Callable[[_Item], Sequence[str]],
) -> list[_Item]:
    """Take out of `waiting` (in topological order) all that can run, in order, and add what they make to `known`."""
    done, remaining = [], []
    for item in waiting:
        if all(name in known or name not in made for name in read(item)):
            known.update(written(item))
            done.append(item)
        else:
            remaining.append(item)
    waiting[:] = remaining
    return done
