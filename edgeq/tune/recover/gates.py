"""Convolutions before a gate, x = y g(y) as in SiLU and GELU: found, and computed twice, once for each of the two
readers of y.

    y  = W u + b          →  g(y)
    y' = (W u + b) / k    →  x' = y' g(y)     per channel k; the layers that read x' have their weights multiplied by k

In floats the network computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.graph.edit import Editor
from edgeq.graph.index import GraphIndex
from edgeq.graph.query import is_op, name_of, readers
from edgeq.tune.recover.elementwise import Follower, Followers
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.scaling import Weights, only_layers

VALUE = "/value"
"""Suffix of the names of a layer's second form, its weights and its output."""


@dataclass(frozen=True, eq=False)
class Gate:
    """A layer whose output is multiplied by a function of itself.

    Attributes:
        layer: computes y.
        product: name of the Mul that computes x.
        gate: name of the tensor g(y).
        follower: the nodes from y to x.
        readers: the layers that read x, if nothing else does; else empty, and then channels cannot be scaled.
    """

    layer: Layer
    product: str
    gate: str
    follower: Follower
    readers: tuple[Layer, ...]


def find_gates(model: ir.Model) -> tuple[Gate, ...]:
    """All gates of the main graph whose layer serves nothing else."""
    layers = {layer.name: layer for layer in find_layers(model)}
    by_output = {layer.output: layer for layer in layers.values()}
    followers, weights = Followers(model), Weights(model)
    found = []
    for node in model.graph:
        if not is_op(node, "Mul"):
            continue
        for value, gate in (tuple(node.inputs), tuple(reversed(node.inputs))):
            layer = by_output.get(name_of(value))
            if layer is None or layer.op_type == "MatMul" or not weights.alone(layer.weight, layer.bias):
                continue
            follower = _up_to(followers.of(layer.output), node)
            inside = {output for made in follower.nodes for output in made.outputs} if follower else ()
            if follower is not None and gate in inside:
                reading = _reading_layers(node.outputs[0], layer, layers, weights)
                found.append(Gate(layer, node.name or "", name_of(gate), follower, reading))
                break
    return tuple(found)


def split_all(model: ir.Model, factors: Sequence[tuple[Gate, Floats]]) -> None:
    """Split gates of `model`, in place, each with its k, float64 [channels].

    They are split in the order of the graph: a layer that reads the output of an earlier gate must be scaled before it
    is copied itself.

    Args:
        factors: gates of this model, or of the one that it is a clone of.
    """
    index = GraphIndex(model)
    editor = Editor(model)
    for gate, factor in sorted(factors, key=lambda pair: index.order[pair[0].layer.name]):
        _split(editor, index, gate, factor)


def _split(editor: Editor, index: GraphIndex, gate: Gate, factor: Floats) -> None:
    """Split one gate. Nodes keep their names; the second form of the layer gets the suffix `VALUE`."""
    layer, first = gate.layer, index.nodes[gate.layer.name]
    weights = Weights(editor.model)
    weight, bias = weights.scaled_outputs(layer, 1 / factor)
    inputs = [first.inputs[0], editor.constant(layer.weight + VALUE, weight.astype("float32"))]
    if bias is not None:
        inputs.append(editor.constant(layer.bias + VALUE, bias.astype("float32")))
    output = first.outputs[0]
    second = editor.node(
        layer.op_type,
        inputs,
        layer.name + VALUE,
        output=layer.output + VALUE,
        after=first,
        like=output,
        attributes=first.attributes,
        domain=first.domain,
    )
    product = index.nodes[gate.product]
    product.replace_input_with(product.inputs.index(output), second)
    for reader in gate.readers:
        weights.scale_inputs(reader, factor)


def _up_to(follower: Follower, end: ir.Node) -> Follower | None:
    """The part of a follower that the output of `end` depends on, if nothing in it is read elsewhere but that output;
    None where `end` is no part of it."""
    inside = set(follower.nodes)
    needed: set[ir.Node] = set()
    waiting: list[ir.Node | None] = [end]
    while waiting:
        node = waiting.pop()
        if node in inside and node not in needed:
            needed.add(node)
            waiting.extend(value.producer() for value in node.inputs if value is not None)
    if end not in needed:
        return None
    read_outside = {name_of(value) for node in inside - needed for value in node.inputs} | set(follower.ends)
    inner = {name_of(node.outputs[0]) for node in needed - {end}} | {follower.tensor}
    if inner & read_outside:
        return None
    return Follower(follower.tensor, tuple(n for n in follower.nodes if n in needed), (name_of(end.outputs[0]),))


def _reading_layers(value: ir.Value, maker: Layer, layers: Mapping[str, Layer], weights: Weights) -> tuple[Layer, ...]:
    if value.is_graph_output():
        return ()
    found = only_layers(readers(value), name_of(value), maker, layers)
    return found if all(weights.alone(layer.weight) for layer in found) else ()
