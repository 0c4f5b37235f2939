"""Convolutions in front of a gate, x = y g(y) as in SiLU and GELU: found, and computed twice, once for each of the two
readers of y.

    y  = W u + b          →  g(y)
    y' = (W u + b) / k    →  x' = y' g(y)     per channel k; who reads x' has its weights multiplied by k

In floats the network computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from edgeq.tune.recover.elementwise import Follower, Followers
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.scaling import Weights, only_layers
from edgeq.tune.recover.uses import readers

VALUE = "/value"
"""Behind the names of a layer's second form, its weights and its output."""


@dataclass(frozen=True, eq=False)
class Gate:
    """A layer whose output is multiplied by a function of itself.

    Attributes:
        layer: gives y.
        product: the Mul that gives x.
        gate: the tensor g(y).
        follower: the nodes from y to x.
        readers: the layers that read x, if nothing else does; else empty, and then channels cannot be scaled.
    """

    layer: Layer
    product: onnx.NodeProto
    gate: str
    follower: Follower
    readers: tuple[Layer, ...]


def find_gates(model: onnx.ModelProto) -> tuple[Gate, ...]:
    """All gates of the main graph whose layer serves nothing else."""
    layers = {layer.name: layer for layer in find_layers(model)}
    by_output = {layer.output: layer for layer in layers.values()}
    followers = Followers(model)
    weights = Weights(model)
    found = []
    for node in model.graph.node:
        if node.op_type != "Mul" or len(node.input) != 2:
            continue
        for tensor, gate in (tuple(node.input), tuple(reversed(node.input))):
            layer = by_output.get(tensor)
            if layer is None or layer.op_type == "MatMul" or not weights.alone(layer.weight, layer.bias):
                continue
            follower = followers.of(tensor)
            inside = {made.output[0] for made in follower.nodes}
            if gate in inside and node.output[0] in inside:
                direct = [n for n in follower.nodes if tensor in n.input]
                until = _up_to(follower, node.output[0])
                if until is not None and all(n in until.nodes for n in direct):
                    found.append(
                        Gate(layer, node, gate, until, _reading_layers(model, node.output[0], layers, weights))
                    )
                    break
    return tuple(found)


def split_all(model: onnx.ModelProto, factors: Sequence[tuple[Gate, Floats]]) -> None:
    """Split gates of `model`, in place, each with its float64 [channels] k.

    In the order of the graph: a layer that reads what an earlier gate scales must be scaled before it is copied itself.
    """
    place = {node.name: index for index, node in enumerate(model.graph.node)}
    for gate, factor in sorted(factors, key=lambda pair: place[pair[0].layer.name]):
        _split(model, gate, factor)


def _split(model: onnx.ModelProto, gate: Gate, factor: Floats) -> None:
    """Split one gate. Nodes keep their names; the second form of the layer gets `VALUE` behind."""
    layer = gate.layer
    weights = Weights(model)
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if node.name == layer.name)
    weight, bias = weights.scaled_outputs(layer, 1 / factor)
    second = onnx.NodeProto()
    second.CopyFrom(nodes[place])
    second.name = layer.name + VALUE
    second.output[0] = layer.output + VALUE
    second.input[1] = weights.add(layer.weight + VALUE, weight)
    if bias is not None:
        second.input[2] = weights.add(layer.bias + VALUE, bias)
    product = next(node for node in nodes if node.name == gate.product.name)
    position = list(product.input).index(layer.output)
    product.input[position] = second.output[0]
    model.graph.node.insert(place + 1, second)
    known = next((v for v in model.graph.value_info if v.name == layer.output), None)
    if known is not None:
        copy = model.graph.value_info.add()
        copy.CopyFrom(known)
        copy.name = second.output[0]
    for reader in gate.readers:
        weights.scale_inputs(reader, factor)


def _up_to(follower: Follower, end: str) -> Follower | None:
    """The part of a follower that `end` depends on, if nothing in it is read elsewhere but `end`."""
    makers = {node.output[0]: node for node in follower.nodes}
    needed: set[str] = set()
    waiting = [end]
    while waiting:
        name = waiting.pop()
        if name in makers and name not in needed:
            needed.add(name)
            waiting.extend(makers[name].input)
    nodes = tuple(node for node in follower.nodes if node.output[0] in needed)
    outside = [node for node in follower.nodes if node.output[0] not in needed]
    read_outside = {name for node in outside for name in node.input} | set(follower.ends)
    if (needed - {end} | {follower.tensor}) & read_outside:
        return None
    return Follower(follower.tensor, nodes, (end,))


def _reading_layers(
    model: onnx.ModelProto, tensor: str, layers: dict[str, Layer], weights: Weights
) -> tuple[Layer, ...]:
    if tensor in {output.name for output in model.graph.output}:
        return ()
    found = only_layers(readers(model).get(tensor, ()), tensor, layers) or []
    return tuple(found) if all(weights.alone(layer.weight) for layer in found) else ()
