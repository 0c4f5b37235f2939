"""A model's main graph by name: what a user, a table of ranges or a profile calls a node or a tensor."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.graph.query import bodies, captured, constant, is_constant

RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


class GraphIndex:
    """The main graph of a model by the names in it. The model is not changed, and must not be while the index is used.

    Attributes:
        model: the model.
        graph: its main graph.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph

    @cached_property
    def nodes(self) -> dict[str, ir.Node]:
        """Node name → node."""
        return {node.name: node for node in self.graph if node.name}

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        """Tensor name → value: inputs, initializers, and what nodes make."""
        made = [output for node in self.graph for output in node.outputs]
        every = [*self.graph.inputs, *self.graph.initializers.values(), *made]
        return {value.name: value for value in every if value.name}

    @cached_property
    def order(self) -> dict[str, int]:
        """Node name → position in the graph."""
        return {node.name: position for position, node in enumerate(self.graph) if node.name}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of graph inputs that are no weights."""
        return tuple(v.name for v in self.graph.inputs if v.name and not v.is_initializer())

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of graph outputs."""
        return tuple(value.name for value in self.graph.outputs if value.name)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Names of what the bodies of If, Loop and Scan nodes read from the main graph."""
        return frozenset(value.name for node in self.graph for value in captured(node) if value.name)

    @cached_property
    def computed_constants(self) -> frozenset[str]:
        """Names of initializers, and of what is computed from constants alone, the same at each run. What bodies of
        If, Loop and Scan compute is not followed."""
        known = {name for name, value in self.values.items() if is_constant(value)}
        for node in self.graph:
            if node.op_type in RANDOM or next(bodies(node), None) is not None:
                continue
            if known.issuperset(value.name for value in node.inputs if value is not None):
                known.update(output.name for output in node.outputs if output.name)
        return frozenset(known)

    def is_constant(self, name: str) -> bool:
        """Whether `name` is an initializer that nothing can override, or the value of a Constant node."""
        return name in self.values and is_constant(self.values[name])

    def constant(self, name: str) -> NDArray[Any]:
        """Values of a constant; external data is read now.

        Raises:
            KeyError: there is no such constant.
        """
        found = constant(self.values[name])
        if found is None:
            raise KeyError(name)
        return found
