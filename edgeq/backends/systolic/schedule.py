"""An order of layers and float nodes that changes between integers and floats as seldom as it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import onnx

from edgeq.backends.systolic.graph import captured
from edgeq.backends.systolic.network import Layer, layer_inputs, layer_outputs

_Item = TypeVar("_Item")


def alternate(
    layers: Sequence[Layer], floats: Sequence[onnx.NodeProto], inputs: Collection[str]
) -> list[Layer | list[onnx.NodeProto]]:
    """All layers one by one, float nodes in groups as large as dependences allow.

    Greedy: everything of one kind that can run does before the kind changes. Both kinds are tried as the first; the
    order with fewer groups wins.
    """
    made = {name for layer in layers for name in layer_outputs(layer)}
    made |= {name for node in floats for name in node.output if name}
    orders = [_greedy(layers, floats, made, first) for first in (0, 1)]
    return min(orders, key=lambda order: sum(isinstance(item, list) for item in order))


def node_reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, those inside its graphs included."""
    return [name for name in (*node.input, *captured(node)) if name]


def _greedy(
    layers: Sequence[Layer], floats: Sequence[onnx.NodeProto], made: set[str], first: int
) -> list[Layer | list[onnx.NodeProto]]:
    known: set[str] = set()
    waiting: tuple[list[Layer], list[onnx.NodeProto]] = (list(layers), list(floats))
    order: list[Layer | list[onnx.NodeProto]] = []
    kind = first
    while waiting[0] or waiting[1]:
        if kind == 0:
            done = _run(waiting[0], known, made, layer_inputs, layer_outputs)
            order.extend(done)
        else:
            group = _run(waiting[1], known, made, node_reads, lambda node: [name for name in node.output if name])
            if group:
                order.append(group)
        kind = 1 - kind
    return order


def _run(
    waiting: list[_Item],
    known: set[str],
    made: set[str],
    reads: Callable[[_Item], Sequence[str]],
    writes: Callable[[_Item], Sequence[str]],
) -> list[_Item]:
    """Take out of `waiting` (in topological order) all that can run, in order, and add what they make to `known`."""
    done, remaining = [], []
    for item in waiting:
        if all(name in known or name not in made for name in reads(item)):
            known.update(writes(item))
            done.append(item)
        else:
            remaining.append(item)
    waiting[:] = remaining
    return done
