"""The node at which an engine fails that names none: the beginnings of the model are tried, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from edgeq.backends.systolic.fixed_batch import part_of
from edgeq.graph.query import is_op
from edgeq.model.load import read_model, save_model

_PAIR = ("QuantizeLinear", "DequantizeLinear")


def failing_node(model: Path, fails: Callable[[Path], bool], folder: Path) -> ir.Node | None:
    """The first node with which a beginning of `model` fails as the whole does; None where none does.

    Args:
        model: a Q/DQ model, whose nodes are in order.
        fails: whether a model fails.
        folder: for the beginnings.
    """
    graph = read_model(model)
    nodes = [node for node in graph.graph if not is_op(node, *_PAIR)]
    works, broken = 0, len(nodes)
    while broken - works > 1:
        middle = (works + broken) // 2
        file = folder / f"first-{middle}.onnx"
        save_model(_beginning(graph, nodes[:middle]), file)
        works, broken = (works, middle) if fails(file) else (middle, broken)
    return nodes[broken - 1] if nodes else None


def _beginning(model: ir.Model, nodes: list[ir.Node]) -> ir.Model:
    """`nodes` and all that they read, as far as the pairs behind them."""
    wanted = set(nodes)
    stack = list(nodes)
    while stack:
        node = stack.pop()
        before = [value.producer() for value in node.inputs if value is not None]
        behind = [reader for value in node.outputs for reader, _ in value.uses()] if node in wanted else []
        for other in (*before, *(reader for reader in behind if is_op(reader, *_PAIR))):
            if other is not None and other not in wanted:
                wanted.add(other)
                stack.append(other)
    kept = [node for node in model.graph if node in wanted]
    made = [value for node in kept for value in node.outputs]
    outputs = [value for value in made if not any(reader in wanted for reader, _ in value.uses())]
    for value in outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return part_of(model, kept, [v for v in model.graph.inputs if v.uses()], outputs)
