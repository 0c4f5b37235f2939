"""Who makes and who reads each tensor of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from edgeq.model.tensors import iter_graphs


@dataclass(frozen=True)
class Reader:
    """One place where a tensor is read."""

    node: onnx.NodeProto
    place: int


@dataclass(frozen=True)
class Wiring:
    """Attributes:
    makers: tensor → the node that makes it.
    readers: tensor → where the nodes of the main graph read it, in order.
    order: node name → place in the graph.
    outputs: names of graph outputs.
    captured: tensors of the main graph that bodies of If, Loop and Scan read.
    initializers: by name.
    """

    makers: Mapping[str, onnx.NodeProto]
    readers: Mapping[str, tuple[Reader, ...]]
    order: Mapping[str, int]
    outputs: frozenset[str]
    captured: frozenset[str]
    initializers: Mapping[str, onnx.TensorProto]

    def only_reader(self, tensor: str) -> onnx.NodeProto | None:
        """The node that alone reads `tensor`, if there is just one and nothing else needs it."""
        readers = self.readers.get(tensor, ())
        alone = len(readers) == 1 and tensor not in self.outputs and tensor not in self.captured
        return readers[0].node if alone else None


def wire(model: onnx.ModelProto) -> Wiring:
    """The wiring of the main graph."""
    graph = model.graph
    readers: dict[str, list[Reader]] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name:
                readers.setdefault(name, []).append(Reader(node, place))
    bodies = [body for body in iter_graphs(graph) if body is not graph]
    read_inside = {name for body in bodies for node in body.node for name in node.input}
    read_inside |= {output.name for body in bodies for output in body.output}
    return Wiring(
        makers={output: node for node in graph.node for output in node.output if output},
        readers={name: tuple(places) for name, places in readers.items()},
        order={node.name: place for place, node in enumerate(graph.node)},
        outputs=frozenset(output.name for output in graph.output),
        captured=frozenset(read_inside),
        initializers={tensor.name: tensor for tensor in graph.initializer},
    )


def has_body(node: onnx.NodeProto) -> bool:
    """Whether it is an If, Loop or Scan."""
    return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
