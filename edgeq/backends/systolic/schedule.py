"""An order of layers and float nodes with few changes between integers and floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx_ir as ir

from edgeq.backends.systolic.network import Layer, layer_inputs, layer_outputs
from edgeq.graph.query import name_of, reads

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
