"""Find the float tensors whose values must be exact: those that become an index, and those that hold whole numbers.

A rounding error in such a tensor does not become noise in the output. An index that is wrong by one selects another
row, and a comparison of two counts has another result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from edgeq.model.graph import (
    MAIN_DOMAINS,
    GraphIndex,
    bodies,
    constant,
    indexed,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    opset_of,
)
from edgeq.model.shapes import element_types

# Operators with index inputs that may also be floats.
_INDEXED_BY_FLOATS = frozenset({"OneHot", "Range"})
_WHOLE = frozenset({"Ceil", "Floor", "Round", "Sign"})
# Operators whose outputs are whole numbers if their float inputs are.
_KEEP_WHOLE = frozenset(
    {
        "Abs", "Add", "Clip", "Concat", "CumSum", "GatherElements", "GatherND", "Max", "Min", "Mod", "Mul", "Neg",
        "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "ScatterElements", "ScatterND", "Sub",
        "Sum", "Where",
    }
)  # fmt: skip


class Exactness:
    """Answer which tensors of a model must be exact. The model must not change while this object is in use."""

    def __init__(self, model: ir.Model | GraphIndex) -> None:
        self._graph = indexed(model).graph
        self._opset = opset_of(indexed(model).model)
        self._types = element_types(model)

    def index_casts(self) -> dict[ir.Node, ir.Node]:
        """Return the Cast nodes from floats to integers whose output leads to an index, each with a node that reads the
        index. An index is an input that the operator's schema limits to integers, such as that of Gather.
        """
        reading: dict[ir.Value, ir.Node] = {}
        casts: dict[ir.Node, ir.Node] = {}
        # In reverse order, a node's outputs are known to lead to an index before its inputs are.
        for node in reversed(list(self._graph.all_nodes())):
            behind = next((reading[output] for output in node.outputs if output in reading), None)
            for place, value in enumerate(node.inputs):
                reader = behind or (node if self._is_index(node, place) else None)
                if value is not None and reader is not None and self._type(value).is_integer():
                    reading.setdefault(value, reader)
            # Only from here on upstream are floats at stake. Integers are exact anyway.
            if behind is not None and is_op(node, "Cast") and self._is_float(node.inputs[0]):
                casts[node] = behind
        return casts

    def whole_numbers(self) -> tuple[ir.Value, ...]:
        """Return the computed float tensors of the main graph that contain only whole numbers, as far as the operators
        show it.
        """
        integral: dict[ir.Value, None] = {}

        def is_whole(value: ir.Value) -> bool:
            values = constant(value)
            if values is not None:
                return values.dtype.kind != "f" or bool(np.all(values == np.rint(values)))
            return value in integral or not self._is_float(value)

        for node in self._graph:
            inputs = [value for value in node.inputs if value is not None]
            # These return whole numbers only if all of their inputs are whole.
            keeps = moves_data(node) or is_op(node, "Cast", *_KEEP_WHOLE)
            if is_op(node, *_WHOLE) or (keeps and inputs and all(map(is_whole, inputs))):
                integral.update(dict.fromkeys(filter(self._is_float, node.outputs)))
        return tuple(integral)

    def angles(self) -> Iterator[ir.Value]:
        """Yield the arguments of the trigonometric functions of the main graph."""
        for node in self._graph:
            value = node_input(node, 0)
            if is_op(node, "Sin", "Cos", "Tan") and value is not None:
                yield value

    def origins(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield a float tensor and the float tensors from which it is computed, back to the outputs of layers, of Q/DQ
        pairs and of nodes with bodies. Constants are left out.
        """
        visited: set[ir.Value] = set()
        waiting = [value]
        while waiting:
            at = waiting.pop()
            if at in visited or constant(at) is not None or not self._is_float(at):
                continue
            visited.add(at)
            yield at
            node = at.producer()
            if node is None or node.domain not in MAIN_DOMAINS or any(bodies(node)):
                continue
            if not (operator_of(node).mac_rule or operator_of(node).quantized):
                waiting.extend(operand for operand in node.inputs if operand is not None)

    def _is_index(self, node: ir.Node, place: int) -> bool:
        if node.domain not in MAIN_DOMAINS or node.op_type in _INDEXED_BY_FLOATS:
            return True
        # ONNX Runtime's own operators have no schema in onnx.
        if not onnx.defs.has(node.op_type, ""):
            return False
        inputs = onnx.defs.get_schema(node.op_type, self._opset, "").inputs
        types = inputs[min(place, len(inputs) - 1)].types if inputs else ("",)
        return all("int" in kind and "uint" not in kind for kind in types)

    def _is_float(self, value: ir.Value | None) -> bool:
        return value is not None and self._type(value).is_floating_point()

    def _type(self, value: ir.Value) -> ir.DataType:
        return value.dtype or self._types.get(name_of(value), ir.DataType.UNDEFINED)


def is_layer_output(value: ir.Value) -> bool:
    """Return whether a tensor is the output of a node that multiplies matrices."""
    node = value.producer()
    return node is not None and bool(operator_of(node).mac_rule)
