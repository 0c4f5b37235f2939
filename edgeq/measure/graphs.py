"""A model's graph and the questions that matching asks it: who makes a tensor, who reads it, what is constant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgeq.model.load import load_model


class GraphIndex:
    """The main graph of a model and an index of it. The model is not changed.

    Args:
        model: external data may be left on disk.
        path: where it was read from; external data is looked for in its folder.
    """

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        self.model = model
        self.path = path

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """Tensor → the node that makes it."""
        return {name: node for node in self.model.graph.node for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
        """Tensor → the nodes that read it as an input, and at which place."""
        found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self.model.graph.node:
            for place, name in enumerate(node.input):
                if name:
                    found.setdefault(name, []).append((node, place))
        return found

    @cached_property
    def nodes(self) -> dict[str, onnx.NodeProto]:
        """Node name → node."""
        return {node.name: node for node in self.model.graph.node if node.name}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Graph inputs that are no weights."""
        return tuple(i.name for i in self.model.graph.input if i.name not in self._tensors)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.model.graph.output)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Tensors that the bodies of If, Loop and Scan nodes may read from the main graph."""
        return frozenset(name for node in self.model.graph.node for name in captured_by(node))

    @cached_property
    def computed_constants(self) -> frozenset[str]:
        """Initializers, and what is computed from constants alone."""
        known = set(self._tensors)
        for node in self.model.graph.node:
            reads = [name for name in [*node.input, *captured_by(node)] if name]
            if (reads or node.op_type == "Constant") and known.issuperset(reads):
                known.update(name for name in node.output if name)
        return frozenset(known)

    def is_constant(self, name: str) -> bool:
        """Whether `name` is an initializer or the value of a Constant node."""
        return name in self._tensors

    def tensor(self, name: str) -> onnx.TensorProto:
        """A constant as it is stored."""
        return self._tensors[name]

    def constant(self, name: str) -> NDArray[Any]:
        """Values of a constant; external data is read now."""
        return numpy_helper.to_array(self._tensors[name], base_dir=str(self.path.parent))

    @cached_property
    def _tensors(self) -> dict[str, onnx.TensorProto]:
        found = {tensor.name: tensor for tensor in self.model.graph.initializer}
        for node in self.model.graph.node:
            if node.op_type == "Constant":
                found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
        return found


def read_graph(path: Path) -> GraphIndex:
    """Load a model, checked, with its external data left on disk until a constant is asked for. Whoever has a model
    whose external data lies in another folder makes the `GraphIndex` with a path in that folder.

    Raises:
        ModelError: it is no model, or a damaged one.
    """
    return GraphIndex(load_model(path, external_data="none"), path)


def captured_by(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the bodies of a node read; names made inside a body are among them and do no harm."""
    for attribute in node.attribute:
        for body in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            for inner in body.node:
                yield from inner.input
                yield from captured_by(inner)
            yield from (o.name for o in body.output)


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)
