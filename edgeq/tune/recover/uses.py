"""Who reads which tensor of a model, the bodies of If, Loop and Scan and the outside included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx


def captured_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the bodies of a node read; names made inside a body are among them."""
    for attribute in node.attribute:
        for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in body.node:
                yield from inner.input
                yield from captured_by(inner)
            yield from (o.name for o in body.output)


def reads(node: onnx.NodeProto) -> set[str]:
    """What a node and the bodies inside it read; names made inside a body are among them."""
    return {name for name in (*node.input, *captured_by(node)) if name}


def readers(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Tensor → nodes of the main graph that read it or have a body that does, in the order of the graph."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in reads(node):
            found.setdefault(name, []).append(node)
    return found


def uses(model: onnx.ModelProto) -> Counter[str]:
    """Tensor → how often it is read: by each input of a node, by each node with a body that reads it, and as an output
    of the model."""
    found: Counter[str] = Counter(output.name for output in model.graph.output)
    for node in model.graph.node:
        found.update(name for name in node.input if name)
        found.update({name for name in captured_by(node) if name})
    return found
