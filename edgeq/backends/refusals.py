"""Find all nodes of a model that a file format cannot express, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from edgeq.model.graph import name_of, sizes


def find_refusals(
    graph: ir.Graph,
    lower: Callable[[ir.Node], None],
    refusal: type[Exception],
    substitute: Callable[[ir.Value, Sequence[int]], None],
) -> Iterator[tuple[ir.Node, str]]:
    """Lower all nodes in the order of the graph, and yield each node that cannot be lowered, with the reason.

    A node is left out if it depends on a node that was yielded and whose outputs have no known sizes.

    Args:
        lower: lowers one node, or raises `refusal` with the reason.
        substitute: takes an output of a refused node and its shape. It makes a stand-in, so that the nodes behind are
            still tried.
    """
    unknown: set[str] = set()
    for node in graph:
        outputs = [value for value in node.outputs if value.name]
        # It would be refused for the lack of an input, which is no fault of its own.
        if any(name_of(value) in unknown for value in node.inputs):
            unknown.update(map(name_of, outputs))
            continue
        try:
            lower(node)
        except refusal as error:
            yield node, str(error)
            for value in outputs:
                shape = sizes(value)
                if shape is None:
                    unknown.add(name_of(value))
                else:
                    substitute(value, shape)
