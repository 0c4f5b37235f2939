"""Turn a prepared float model into a network: int8 layers for the array and its core, and float parts. For each node of
a float part, the network records why the node stays in float.

The network is built from a rewritten copy of the model at batch 1 (`rewrites`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Network, Weighted, step_inputs, step_outputs
from edgeq.backends.systolic.recognise import CONSTANT_OPERAND, recognise
from edgeq.backends.systolic.rewrites import fixed_batch, rewrite
from edgeq.model.convert import to_bytes
from edgeq.model.graph import GraphIndex, constant, is_constant, name_of, only_reader, readers, reads, sizes
from edgeq.model.int8_prediction import foreign_type_reason, hazardous_nodes
from edgeq.model.parts import part_of

_ANCHORS = (steps.Conv, steps.Fc)

_SURROUNDED = "its inputs are in float, and quantizing them for this operator alone would gain nothing"

_Item = TypeVar("_Item", bound=Layer | ir.Node)

LayersByNode = dict[str, tuple[Layer, ...]]
"""Layers by the name of their node. A node that became part of the layer before it has no layers."""


def build_network(
    model: ir.Model,
    path: Path,
    *,
    exclude: Mapping[str, str] = MappingProxyType({}),
    op_types: Collection[str] | None = None,
    hazards: Mapping[str, str] = MappingProxyType({}),
) -> Network:
    """Return the network of a prepared model. The model itself does not change.

    Args:
        path: the model's file, for messages.
        exclude: the reason for each node that stays in float.
        op_types: operator types that may become int8; None means all.
        hazards: names of tensors that must not be in 8 bits, each with the text that follows the tensor's name in the
            reason why a node stays in float.

    Raises:
        ModelError: an input's size is not fixed.
    """
    fixed = fixed_batch(model, path)
    # A hazard replaces the user's reason: it holds for every scheme.
    float_reasons = {**exclude, **hazardous_nodes(model, hazards)}
    rewrite(fixed, lambda node: not _choice_reason(node, float_reasons, op_types))
    index = GraphIndex(fixed)
    layers_by_node: LayersByNode = {}
    reasons: dict[str, str] = {}
    for node in fixed.graph:
        recognised = _choice_reason(node, float_reasons, op_types) or recognise(fixed, node)
        if isinstance(recognised, str):
            reasons[node.name or ""] = recognised
        else:
            layers_by_node[node.name or ""] = recognised
    # First, because a bias that stays an Add in float would separate the layers around it.
    _fold_biases(index, layers_by_node, reasons)
    _settle(index, layers_by_node, reasons)
    layers = [layer for node in fixed.graph if node.name in layers_by_node for layer in layers_by_node[node.name]]
    # After `_settle`, which may move a Relu to float.
    layers = _fold_relus(layers, index.outputs)
    floats = [node for node in fixed.graph if node.name in reasons]
    # Each change between integers and floats costs conversions on the core.
    ordered = alternate(layers, floats)
    int8_inputs = {name for layer in layers for name in step_inputs(layer)}
    all_layers = tuple(
        _float_layer(fixed, item, int8_inputs, reasons, number) if isinstance(item, list) else item
        for number, item in enumerate(ordered)
    )
    shapes = {name: sizes(value) or () for name, value in index.values.items()}
    for layer in layers:
        if isinstance(layer, steps.AveragePool):  # a tensor that the float model does not have
            shapes.setdefault(layer.output, (*shapes[layer.input][:2], 1, 1))
    used = {*index.inputs, *(n for layer in all_layers for n in (*step_inputs(layer), *step_outputs(layer)))}
    return Network(
        inputs=index.inputs,
        outputs=index.outputs,
        layers=all_layers,
        shapes={name: shapes[name] for name in sorted(used)},
        dtypes={name: _dtype(index.values.get(name)) for name in sorted(used)},
    )


def _dtype(value: ir.Value | None) -> str:
    return "float32" if value is None or value.dtype is None else str(value.dtype.numpy().name)


def _choice_reason(node: ir.Node, float_reasons: Mapping[str, str], op_types: Collection[str] | None) -> str:
    """Return why the caller's choices keep a node in float; "" if they do not."""
    if node.name is not None and node.name in float_reasons:
        return float_reasons[node.name]
    return foreign_type_reason(node.op_type) if op_types is not None and node.op_type not in op_types else ""


def _settle(index: GraphIndex, layers_by_node: LayersByNode, reasons: dict[str, str]) -> None:
    """Move layers from `layers_by_node` to `reasons`, in place, if in int8 they would only add conversions.

    Convolutions and products are worth a conversion. Any other layer becomes int8 if it reads an int8 tensor. Two other
    kinds of layers also become int8 if all readers of their results are int8: layers that read nothing but graph
    inputs, and plain reshapes. The conversion then comes before the layer instead of after it.
    """
    integers: set[ir.Value] = set()
    for node in index.graph:
        name = node.name or ""
        if name not in layers_by_node:
            continue
        # A node that was folded has no layer, but its output is the integer tensor of the layer before it.
        if not layers_by_node[name]:
            integers.update(node.outputs)
            continue
        first_layer = layers_by_node[name][0]
        sources = [value for value in node.inputs if value is not None and not is_constant(value)]
        worth = isinstance(first_layer, _ANCHORS) or not integers.isdisjoint(sources)
        # A reshape moves nothing in either type, so the conversion may as well come before it.
        reshapes = isinstance(first_layer, steps.Rearrange) and first_layer.index is None
        if not worth and (reshapes or all(value.is_graph_input() for value in sources)):
            worth = all(_wants_integers(layers_by_node, value) for value in node.outputs if value.name)
        if worth:
            integers.update(value for value in node.outputs if value.name)
        else:
            del layers_by_node[name]
            reasons[name] = _SURROUNDED


def _wants_integers(layers_by_node: LayersByNode, tensor: ir.Value) -> bool:
    nodes = readers(tensor)
    if not nodes or tensor.is_graph_output():
        return False
    for node in nodes:
        layers = layers_by_node.get(node.name or "")
        if layers is None:
            return False
        # A layer that passes integers on is worth a conversion only if someone behind it wants them.
        if not isinstance(layers[0], _ANCHORS) and not all(
            _wants_integers(layers_by_node, v) for v in node.outputs if v.name
        ):
            return False
    return True


def _fold_biases(index: GraphIndex, layers_by_node: LayersByNode, reasons: dict[str, str]) -> None:
    """Fold each Add of one constant per channel into the bias of the MatMul or Conv before it, in place."""
    for node in index.graph:
        layers = layers_by_node.get(node.name or "")
        layer = layers[0] if layers else None
        following = only_reader(index.values[layer.output]) if isinstance(layer, steps.Fc | steps.Conv) else None
        name = following.name or "" if following is not None else ""
        if following is None or following.op_type != "Add" or reasons.get(name) != CONSTANT_OPERAND:
            continue
        assert isinstance(layer, steps.Fc | steps.Conv)
        addend = next(values for value in following.inputs if (values := constant(value)) is not None)
        # A constant that broadcasts to more axes makes the result larger than the layer's.
        if _per_channel(addend, layer) and sizes(following.outputs[0]) == sizes(node.outputs[0]):
            del reasons[name]
            bias = layer.bias + np.broadcast_to(addend.astype(np.float64).ravel(), layer.bias.shape)
            sources, output = (*layer.sources, name), name_of(following.outputs[0])
            layers_by_node[node.name or ""] = (dataclasses.replace(layer, bias=bias, output=output, sources=sources),)
            # The Add stays known as a node without layers, so that reports can name what computes it.
            layers_by_node[name] = ()


def _per_channel(values: np.ndarray, layer: Weighted) -> bool:
    """Return whether a constant broadcasts to one value per output channel."""
    if values.size == 1:
        return True
    if values.size != len(layer.bias):
        return False
    if isinstance(layer, steps.Conv):
        return values.ndim >= 3 and int(values.shape[-3]) == values.size
    return int(values.shape[-1]) == values.size


def _fold_relus(layers: list[Layer], outputs: Collection[str]) -> list[Layer]:
    """Return the layers with each Relu folded into a convolution, product or sum, if nothing else reads the result of
    that layer.
    """
    readers_by_tensor = steps.readers(layers)
    folded: list[Layer] = []
    gone: set[str] = set()
    for layer in layers:
        if layer.name in gone:
            continue
        if isinstance(layer, steps.Conv | steps.Fc | steps.ResidualAdd) and layer.output not in outputs:
            following = readers_by_tensor[layer.output]
            clamp = following[0] if len(following) == 1 else None
            # A clamp with an upper bound may also become a relu, but only the scales can tell (`lower`).
            if isinstance(clamp, steps.Clamp) and clamp.low == 0 and math.isinf(clamp.high):
                sources = (*layer.sources, *clamp.sources)
                gone.add(clamp.name)
                layer = dataclasses.replace(layer, relu=True, output=clamp.output, sources=sources)
        folded.append(layer)
    return [layer for layer in folded if layer.name not in gone]


def _float_layer(
    model: ir.Model, nodes: list[ir.Node], int8_inputs: Collection[str], reasons: Mapping[str, str], number: int
) -> steps.Float:
    """Return one layer that contains these nodes, which stay in float.

    Args:
        int8_inputs: names of the tensors that int8 layers read.
    """
    inside = {value for node in nodes for value in node.outputs}
    # A dictionary keeps the order, so that the same model gives the same bytes.
    needs = dict.fromkeys(value for node in nodes for value in reads(node))
    inputs = [value for value in needs if value not in inside and not is_constant(value)]
    outputs = [
        value
        for node in nodes
        for value in node.outputs
        if value.name
        and (value.name in int8_inputs or value.is_graph_output() or not set(readers(value)).issubset(nodes))
    ]
    node_reasons = {node.name or "": reasons[node.name or ""] for node in nodes}
    content = to_bytes(part_of(model, nodes, inputs, outputs))
    names = tuple(map(name_of, inputs)), tuple(map(name_of, outputs))
    return steps.Float(f"float/{number}", *names, content, node_reasons, tuple(node_reasons))


def alternate(layers: Sequence[Layer], floats: Sequence[ir.Node]) -> list[Layer | list[ir.Node]]:
    """Return the int8 layers in an order in which they can run, with the float nodes between them in groups.

    The groups are as large as the dependences between the nodes allow. The search is greedy: it takes every item of one
    kind that can run before it switches to the other kind. It runs twice, once starting with each kind, and the order
    with fewer groups is returned.
    """
    computed = {name for item in (*layers, *floats) for name in _writes(item)}
    orders = [_greedy(layers, floats, computed, floats_first) for floats_first in (False, True)]
    return min(orders, key=lambda order: sum(isinstance(item, list) for item in order))


def _greedy(
    layers: Sequence[Layer], floats: Sequence[ir.Node], computed: set[str], floats_first: bool
) -> list[Layer | list[ir.Node]]:
    available: set[str] = set()
    remaining_layers, remaining_floats = list(layers), list(floats)
    order: list[Layer | list[ir.Node]] = []
    in_float = floats_first
    while remaining_layers or remaining_floats:
        if in_float:
            group = _take_ready(remaining_floats, available, computed)
            order += [group] if group else []
        else:
            order += _take_ready(remaining_layers, available, computed)
        in_float = not in_float
    return order


def _take_ready(waiting: list[_Item], available: set[str], computed: set[str]) -> list[_Item]:
    """Remove from `waiting` the items that can run, and return these items in order. Add their outputs to `available`.

    Args:
        waiting: items in topological order.
    """
    ready, remaining = [], []
    for item in waiting:
        if all(name in available or name not in computed for name in _reads(item)):
            available.update(_writes(item))
            ready.append(item)
        else:
            remaining.append(item)
    # In place: the caller's list is what is left to order.
    waiting[:] = remaining
    return ready


def _reads(item: Layer | ir.Node) -> Sequence[str]:
    return [name_of(value) for value in reads(item)] if isinstance(item, ir.Node) else step_inputs(item)


def _writes(item: Layer | ir.Node) -> Sequence[str]:
    if isinstance(item, ir.Node):
        return [value.name for value in item.outputs if value.name]
    return step_outputs(item)
