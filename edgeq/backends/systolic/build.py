"""From a prepared float model to a network: what the array and its core do in int8, what stays in float, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx

from edgeq.backends.systolic.graph import Graph, open_graph, submodel
from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConvLayer,
    FcLayer,
    FloatLayer,
    Layer,
    Network,
    layer_inputs,
    layer_outputs,
)
from edgeq.backends.systolic.recognise import recognise
from edgeq.backends.systolic.rewrite import rewritten
from edgeq.backends.systolic.schedule import alternate, node_reads

_ANCHORS = (ConvLayer, FcLayer)
_SURROUNDED = "what it reads is in float, and quantizing it for this operator alone would gain nothing"
_DTYPES: Mapping[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT8: "uint8",
}


def build_network(
    model: onnx.ModelProto, path: Path, *, exclude: Collection[str] = (), op_types: Collection[str] | None = None
) -> Network:
    """The layers of a prepared model, weights in memory.

    Args:
        path: the model's file, for messages.
        exclude: names of nodes that stay in float.
        op_types: operator types that may become int8; None means all.

    Raises:
        ModelError: sizes are not fixed beforehand.
    """
    graph = rewritten(open_graph(model, path))
    found, reasons = _candidates(graph, exclude, op_types)
    _settle(graph, found, reasons)
    layers = [layer for node in graph.nodes if node.name in found for layer in found[node.name]]
    layers = _fold_biases(graph, layers, found, reasons)
    layers = _fold_relus(layers, graph.outputs)
    floats = [node for node in graph.nodes if node.name in reasons]
    shapes = {name: shape for name, shape in graph.shapes.items() if name not in graph.constants}
    for layer in layers:
        if isinstance(layer, AverageLayer):  # the tensor before its rows and columns are dropped has no name elsewhere
            shapes.setdefault(layer.output, (*shapes[layer.input][:2], 1, 1))
    ordered = alternate(layers, floats, graph.inputs)
    whole = tuple(
        item if not isinstance(item, list) else _float_layer(graph, item, layers, reasons, number)
        for number, item in enumerate(ordered)
    )
    used = {*graph.inputs, *(n for layer in whole for n in (*layer_inputs(layer), *layer_outputs(layer)))}
    return Network(
        inputs=graph.inputs,
        outputs=graph.outputs,
        layers=whole,
        shapes={name: shapes.get(name, ()) for name in sorted(used)},
        dtypes={name: _DTYPES.get(graph.types.get(name, 1), "float32") for name in sorted(used)},
    )


def _candidates(
    graph: Graph, exclude: Collection[str], op_types: Collection[str] | None
) -> tuple[dict[str, tuple[Layer, ...]], dict[str, str]]:
    found: dict[str, tuple[Layer, ...]] = {}
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in exclude:
            reasons[node.name] = "excluded by request"
        elif op_types is not None and node.op_type not in op_types:
            reasons[node.name] = f"{node.op_type} is not among the operator types that the scheme quantizes"
        else:
            layers = recognise(graph, node)
            if isinstance(layers, str):
                reasons[node.name] = layers
            else:
                found[node.name] = layers
    return found, reasons


def _settle(graph: Graph, found: dict[str, tuple[Layer, ...]], reasons: dict[str, str]) -> None:
    """Move layers that would only add conversions from `found` to `reasons`, in place.

    Convolutions and products are worth a conversion. Everything else is in int8 where what it reads is; on inputs of
    the graph, where all that reads its result is.
    """
    integers: set[str] = set()
    neutral = set(graph.inputs)
    for node in graph.nodes:
        if node.name not in found:
            continue
        layers = found[node.name]
        sources = [name for name in node.input if name and name not in graph.constants]
        worth = isinstance(layers[0], _ANCHORS) or any(name in integers for name in sources)
        if not worth and all(name in neutral for name in sources):
            worth = all(_wants_integers(graph, found, name) for name in node.output if name)
        if worth:
            integers.update(name for name in node.output if name)
        else:
            del found[node.name]
            reasons[node.name] = _SURROUNDED


def _wants_integers(graph: Graph, found: Mapping[str, tuple[Layer, ...]], tensor: str) -> bool:
    readers = graph.readers.get(tensor, [])
    if not readers or tensor in graph.outputs:
        return False
    for node in readers:
        if node.name not in found:
            return False
        if not isinstance(found[node.name][0], _ANCHORS) and not all(
            _wants_integers(graph, found, name) for name in node.output if name
        ):
            return False
    return True


def _fold_biases(
    graph: Graph, layers: list[Layer], found: Mapping[str, tuple[Layer, ...]], reasons: dict[str, str]
) -> list[Layer]:
    """MatMul or Conv followed by an Add of one constant value a channel: the Add becomes bias."""
    folded: list[Layer] = []
    for layer in layers:
        node = graph.only_reader(layer.output) if isinstance(layer, FcLayer | ConvLayer) else None
        if node is not None and node.op_type == "Add" and node.name in reasons:
            assert isinstance(layer, FcLayer | ConvLayer)
            other = next((graph.constants[name] for name in node.input if name in graph.constants), None)
            if other is not None and reasons[node.name] == "one operand is constant" and _per_channel(other, layer):
                del reasons[node.name]
                bias = layer.bias + np.broadcast_to(other.astype(np.float64).ravel(), layer.bias.shape)
                layer = dataclasses.replace(
                    layer, bias=bias, output=node.output[0], sources=(*layer.sources, node.name)
                )
        folded.append(layer)
    return folded


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
    """A Relu, or a Clip from 0, right behind a convolution, product or sum that only it reads becomes part of it; what
    a Clip cuts at its top stays as a clamp, which goes once the scale does the same."""
    readers: dict[str, list[Layer]] = {}
    for layer in layers:
        for name in layer_inputs(layer):
            readers.setdefault(name, []).append(layer)
    names = set(outputs)
    folded: list[Layer] = []
    gone: set[str] = set()
    for layer in layers:
        if layer.name in gone:
            continue
        if isinstance(layer, ConvLayer | FcLayer | AddLayer) and layer.output not in names:
            following = readers.get(layer.output, [])
            if len(following) == 1 and isinstance(clamp := following[0], ClampLayer) and clamp.low == 0:
                sources = (*layer.sources, *clamp.sources)
                if math.isinf(clamp.high):
                    gone.add(clamp.name)
                    layer = dataclasses.replace(layer, relu=True, output=clamp.output, sources=sources)
                else:
                    layer = dataclasses.replace(layer, relu=True)
        folded.append(layer)
    return [layer for layer in folded if layer.name not in gone]


def _float_layer(
    graph: Graph, nodes: list[onnx.NodeProto], layers: list[Layer], reasons: Mapping[str, str], number: int
) -> FloatLayer:
    inside = {name for node in nodes for name in node.output if name}
    outside = {name for layer in layers for name in layer_inputs(layer)}
    names = {node.name for node in nodes}
    read: dict[str, None] = {}
    for name in (n for node in nodes for n in node_reads(node)):
        if name not in inside and name not in graph.constants:
            read[name] = None
    needed = tuple(
        name
        for node in nodes
        for name in node.output
        if name
        and (
            name in outside
            or name in graph.outputs
            or any(reader.name not in names for reader in graph.readers.get(name, []))
        )
    )
    model = submodel(graph, nodes, tuple(read), needed)
    kept = {node.name: reasons[node.name] for node in nodes}
    return FloatLayer(f"float/{number}", tuple(read), needed, model.SerializeToString(), kept, tuple(kept))
