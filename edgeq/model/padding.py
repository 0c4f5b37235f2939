"""Find the positions of a sequence that a mask hides.

A batch of texts or sounds of unlike lengths is filled up with padding. An input, the mask, marks the real positions.
The attention adds a large negative number to the scores of the other positions, or selects one, so that Softmax gives
them no weight. The model computes values at the hidden positions too, but nobody reads them. So they count neither for
ranges nor for figures.

A mask is recognised by its use: an input [N, S] from which alone, with constants, an operand of a sum or selection in
front of a Softmax is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from edgeq_device.measure.basis import Axis, Padding

from edgeq.model.axes import follow_axes
from edgeq.model.graph import GraphIndex, constant, is_op, name_of, operator_of

# Operators between the sum with the mask and the Softmax. Attention scales, moves and clips its scores.
_BETWEEN = frozenset({"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Reshape", "Sub", "Transpose", "Where"})


def find_padding(graph: GraphIndex) -> Padding:
    """Return the masks of a model and the tensors whose positions they hide."""
    return graph.once("padding", lambda: _search(graph))


def _search(graph: GraphIndex) -> Padding:
    reading = _Reading(graph)
    lengths = {name_of(value): value.shape for value in graph.graph.inputs if value.shape is not None}
    masks: dict[str, bool] = {}
    for node in graph.graph:
        if is_op(node, "Softmax") and node.inputs[0] is not None:
            for mask, hidden in _masking(node.inputs[0], reading):
                if len(lengths.get(mask, ())) == 2:
                    masks.setdefault(mask, hidden)
    starts: dict[str, Axis] = {}
    for mask in masks:
        for name, shape in lengths.items():
            # A free length without a name could be any length. A mask leads to the keys of the attention, too.
            is_named = len(shape) >= 2 and (isinstance(shape[1], int) or shape[1].value is not None)
            if is_named and name not in masks and shape[1] == lengths[mask][1]:
                starts.setdefault(name, Axis(1, mask))
    return Padding(masks, follow_axes(graph, starts) if starts else {})


class _Reading:
    """Find the inputs whose values, not only whose shapes, a tensor depends on."""

    def __init__(self, graph: GraphIndex) -> None:
        self._inputs: dict[str, frozenset[str]] = {
            name_of(value): frozenset([name_of(value)]) for value in graph.graph.inputs
        }
        for node in graph.graph:
            values = (
                [] if is_op(node, "Shape", "Size") else [name_of(value) for value in node.inputs if value is not None]
            )
            reads = frozenset().union(*(self._inputs.get(name, frozenset()) for name in values))
            # No mask is the result of a layer. The empty name stands for "a layer".
            reads |= {""} if operator_of(node).mac_rule else set()
            self._inputs.update((name_of(output), reads) for output in node.outputs)

    def is_fixed(self, value: ir.Value | None) -> bool:
        """Return whether a tensor has the same values for all inputs of the same shapes."""
        return not self._inputs.get(name_of(value))

    def only_input(self, value: ir.Value | None) -> str | None:
        """Return the one input that a tensor depends on, or None if there are none or several, or a layer."""
        reads = self._inputs.get(name_of(value), frozenset())
        return next(iter(reads)) or None if len(reads) == 1 else None


def _masking(scores: ir.Value, reading: _Reading) -> Iterator[tuple[str, bool]]:
    """Yield the inputs that mask `scores`, each with the truth value that it has at hidden positions."""
    waiting = [scores]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node.op_type not in _BETWEEN:
            continue
        for value in node.inputs:
            mask = reading.only_input(value)
            if value is None or reading.is_fixed(value):
                continue
            if mask is None:
                waiting.append(value)
            elif is_op(node, "Where") and value is node.inputs[0]:
                yield mask, _hides_if_true(value) == reading.is_fixed(node.inputs[1])
            elif is_op(node, "Add", "Sub", "Min"):
                yield mask, _hides_if_true(value)


def _hides_if_true(value: ir.Value | None) -> bool:
    """Return whether a term of the scores is far below zero where its mask is true. Each negation, and each factor
    that turns the sign around, makes the opposite true.
    """
    hides = True
    while value is not None and (node := value.producer()) is not None:
        operands = [operand for operand in node.inputs if operand is not None]
        constants = [constant(operand) for operand in operands]
        place = next((k for k, array in enumerate(constants) if array is None), 0)
        factor = next((array for array in constants if array is not None and array.size), None)
        value = operands[place] if operands else None
        if is_op(node, "Where") and len(operands) == 3:
            value, low = operands[0], constants[1]
            turns = low is None or float(low.min()) >= 0
        elif is_op(node, "Mul", "Div"):
            turns = factor is not None and float(factor.min()) > 0
        elif is_op(node, "Equal"):
            turns = factor is not None and not factor.any()
        else:
            turns = is_op(node, "Not", "Log") or (is_op(node, "Sub") and place == 1)
        hides ^= turns
    return hides
