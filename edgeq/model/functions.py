"""Check and inline the local functions of a model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError, one_line
from edgeq.model.convert import inner_graphs
from edgeq.model.tensors import iter_graphs

MAX_NODES = 1_000_000
"""Largest number of nodes after functions are inlined. Functions that call other functions can expand exponentially."""


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Refuse functions that call each other in a cycle or expand to more than `MAX_NODES` nodes.

    This check must come before onnx's shape inference and before onnxruntime, because both expand every call.

    Raises:
        ModelError: the functions have a cycle or are too large.
    """
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    # The depth-first search has its own stack, because a chain of calls may exceed Python's recursion limit.
    for root in functions:
        stack = [root]
        open_calls: set[tuple[str, str]] = set()
        while stack:
            key = stack[-1]
            if key in sizes:
                stack.pop()
                continue
            calls = [c for c in _list_calls(functions[key].node) if c in functions]
            pending = [c for c in calls if c not in sizes]
            if pending and key not in open_calls:
                open_calls.add(key)
                stack.extend(pending)
                continue
            if pending:
                raise ModelError(
                    f"{path}: function {key[1]!r} calls itself, directly or through others", "Export the model again"
                )
            sizes[key] = min(len(functions[key].node) + sum(sizes[c] for c in calls), MAX_NODES + 1)
            stack.pop()
    nodes = [node for graph in iter_graphs(model.graph) for node in graph.node]
    total = sum(sizes.get((n.domain, n.op_type), 1) for n in nodes)
    if total > MAX_NODES:
        raise ModelError(f"{path}: its functions expand to more than {MAX_NODES} nodes", "Do not trust this model")


def inline_functions(model: ir.Model, path: Path) -> None:
    """Replace each node that calls a function of the model by the nodes of the function, in place.

    Raises:
        ModelError: a call does not fit its function, for example because it has too many inputs.
    """
    from onnx_ir.passes.common import InlinePass

    try:
        InlinePass()(model)
    except Exception as error:  # ValueError, and the pass's own errors, which wrap other errors
        text = one_line(error.__cause__ or error, most=300)
        raise ModelError(f"{path}: a function cannot be inlined: {text}", "Export the model again") from error


def _list_calls(nodes: Collection[onnx.NodeProto]) -> list[tuple[str, str]]:
    inside = [node for graph in inner_graphs(nodes) for node in graph.node]
    return [(node.domain, node.op_type) for node in (*nodes, *inside)]
