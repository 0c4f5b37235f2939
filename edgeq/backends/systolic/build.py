"""From a prepared float model to a network: what the array and its core do in int8, what stays in float, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic.fixed_batch import fixed_batch, part_of
from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    Layer,
    MoveLayer,
    Network,
    alternate,
    layer_inputs,
    layer_outputs,
)
from edgeq.backends.systolic.network import readers as layer_readers
from edgeq.backends.systolic.program import Float
from edgeq.backends.systolic.recognise import CONSTANT_OPERAND, recognise
from edgeq.backends.systolic.rewrite import rewrite
from edgeq.model.edit import to_bytes
from edgeq.model.graph import GraphIndex, constant, is_constant, name_of, only_reader, readers, reads, sizes
from edgeq.model.int8_prediction import foreign, hazardous_nodes

_ANCHORS = (ConvLayer, FcLayer)
_SURROUNDED = "what it reads is in float, and quantizing it for this operator alone would gain nothing"

Found = dict[str, tuple[Layer, ...]]
"""Layers by node name; none where the node became part of the layer before it."""


def build_network(
    model: ir.Model,
    path: Path,
    *,
    exclude: Collection[str] = (),
    op_types: Collection[str] | None = None,
    hazards: Mapping[str, str] = MappingProxyType({}),
) -> Network:
    """The layers of a prepared model, which is not changed.

    Args:
        path: the model's file, for messages.
        exclude: names of nodes that stay in float.
        op_types: operator types that may become int8; None means all.
        hazards: tensors that must not be in 8 bits, each with what follows its name in the reason.

    Raises:
        ModelError: sizes are not fixed beforehand.
    """
    fixed = fixed_batch(model, path)
    kept = {**dict.fromkeys(exclude, "excluded by request"), **hazardous_nodes(model, hazards)}
    rewrite(fixed, lambda node: not _unwanted(node, kept, op_types))
    index = GraphIndex(fixed)
    found, reasons = _candidates(fixed, kept, op_types)
    _fold_biases(index, found, reasons)
    _settle(index, found, reasons)
    layers = [layer for node in fixed.graph if node.name in found for layer in found[node.name]]
    layers = _fold_relus(layers, index.outputs)
    floats = [node for node in fixed.graph if node.name in reasons]
    ordered = alternate(layers, floats)
    read = {name for layer in layers for name in layer_inputs(layer)}
    whole = tuple(
        item if not isinstance(item, list) else _float_layer(fixed, item, read, reasons, number)
        for number, item in enumerate(ordered)
    )
    shapes = {name: sizes(value) or () for name, value in index.values.items()}
    for layer in layers:
        if isinstance(layer, AverageLayer):  # a tensor that the float model does not have
            shapes.setdefault(layer.output, (*shapes[layer.input][:2], 1, 1))
    used = {*index.inputs, *(n for layer in whole for n in (*layer_inputs(layer), *layer_outputs(layer)))}
    return Network(
        inputs=index.inputs,
        outputs=index.outputs,
        layers=whole,
        shapes={name: shapes[name] for name in sorted(used)},
        dtypes={name: _dtype(index.values.get(name)) for name in sorted(used)},
    )


def _dtype(value: ir.Value | None) -> str:
    return "float32" if value is None or value.dtype is None else str(value.dtype.numpy().name)


def _candidates(
    model: ir.Model, kept: Mapping[str, str], op_types: Collection[str] | None
) -> tuple[Found, dict[str, str]]:
    found: Found = {}
    reasons: dict[str, str] = {}
    for node in model.graph:
        layers = _unwanted(node, kept, op_types) or recognise(model, node)
        if isinstance(layers, str):
            reasons[node.name or ""] = layers
        else:
            found[node.name or ""] = layers
    return found, reasons


def _unwanted(node: ir.Node, kept: Mapping[str, str], op_types: Collection[str] | None) -> str:
    """Why a node stays in float whatever it is; "" where it need not."""
    if node.name is not None and node.name in kept:
        return kept[node.name]
    return foreign(node.op_type) if op_types is not None and node.op_type not in op_types else ""


def _settle(index: GraphIndex, found: Found, reasons: dict[str, str]) -> None:
    """Take layers that would only add conversions out of `found`, and add why to `reasons`, in place.

    Convolutions and products are worth a conversion. Everything else is in int8 where what it reads is; on inputs of
    the graph, and in a plain reshape, which the conversion may as well come before, where all that reads its result is.
    """
    integers: set[ir.Value] = set()
    for node in index.graph:
        name = node.name or ""
        if name not in found:
            continue
        if not found[name]:
            integers.update(node.outputs)
            continue
        first = found[name][0]
        sources = [value for value in node.inputs if value is not None and not is_constant(value)]
        worth = isinstance(first, _ANCHORS) or not integers.isdisjoint(sources)
        reshapes = isinstance(first, MoveLayer) and first.index is None
        if not worth and (reshapes or all(value.is_graph_input() for value in sources)):
            worth = all(_wants_integers(found, value) for value in node.outputs if value.name)
        if worth:
            integers.update(value for value in node.outputs if value.name)
        else:
            del found[name]
            reasons[name] = _SURROUNDED


def _wants_integers(found: Found, tensor: ir.Value) -> bool:
    nodes = readers(tensor)
    if not nodes or tensor.is_graph_output():
        return False
    for node in nodes:
        layers = found.get(node.name or "")
        if layers is None:
            return False
        if not isinstance(layers[0], _ANCHORS) and not all(_wants_integers(found, v) for v in node.outputs if v.name):
            return False
    return True


def _fold_biases(index: GraphIndex, found: Found, reasons: dict[str, str]) -> None:
    """MatMul or Conv followed by an Add of one constant value a channel: the Add becomes bias, in place."""
    for node in index.graph:
        layers = found.get(node.name or "")
        layer = layers[0] if layers else None
        following = only_reader(index.values[layer.output]) if isinstance(layer, FcLayer | ConvLayer) else None
        name = following.name or "" if following is not None else ""
        if following is None or following.op_type != "Add" or reasons.get(name) != CONSTANT_OPERAND:
            continue
        assert isinstance(layer, FcLayer | ConvLayer)
        other = next(values for value in following.inputs if (values := constant(value)) is not None)
        if _per_channel(other, layer) and sizes(following.outputs[0]) == sizes(node.outputs[0]):
            del reasons[name]
            bias = layer.bias + np.broadcast_to(other.astype(np.float64).ravel(), layer.bias.shape)
            sources, output = (*layer.sources, name), name_of(following.outputs[0])
            found[node.name or ""] = (dataclasses.replace(layer, bias=bias, output=output, sources=sources),)
            found[name] = ()


def _per_channel(values: np.ndarray, layer: ConvLayer | FcLayer) -> bool:
    """Whether a constant broadcasts to one value per output channel."""
    if values.size == 1:
        return True
    if values.size != len(layer.bias):
        return False
    if isinstance(layer, ConvLayer):
        return values.ndim >= 3 and int(values.shape[-3]) == values.size
    return int(values.shape[-1]) == values.size


def _fold_relus(layers: list[Layer], outputs: Collection[str]) -> list[Layer]:
    """A Relu right behind a convolution, product or sum that only it reads becomes part of it."""
    read = layer_readers(layers)
    folded: list[Layer] = []
    gone: set[str] = set()
    for layer in layers:
        if layer.name in gone:
            continue
        if isinstance(layer, ConvLayer | FcLayer | AddLayer) and layer.output not in outputs:
            following = read[layer.output]
            clamp = following[0] if len(following) == 1 else None
            if isinstance(clamp, ClampLayer) and clamp.low == 0 and math.isinf(clamp.high):
                sources = (*layer.sources, *clamp.sources)
                gone.add(clamp.name)
                layer = dataclasses.replace(layer, relu=True, output=clamp.output, sources=sources)
        folded.append(layer)
    return [layer for layer in folded if layer.name not in gone]


def _float_layer(
    model: ir.Model, nodes: list[ir.Node], read: Collection[str], reasons: Mapping[str, str], number: int
) -> Float:
    """Nodes that stay in float as one layer.

    Args:
        read: names of the tensors that layers in int8 read.
    """
    inside = {value for node in nodes for value in node.outputs}
    needs = dict.fromkeys(value for node in nodes for value in reads(node))
    inputs = [value for value in needs if value not in inside and not is_constant(value)]
    outputs = [
        value
        for node in nodes
        for value in node.outputs
        if value.name and (value.name in read or value.is_graph_output() or not set(readers(value)).issubset(nodes))
    ]
    kept = {node.name or "": reasons[node.name or ""] for node in nodes}
    content = to_bytes(part_of(model, nodes, inputs, outputs))
    names = tuple(map(name_of, inputs)), tuple(map(name_of, outputs))
    return Float(f"float/{number}", *names, content, kept, tuple(kept))
