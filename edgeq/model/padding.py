"""Find the positions of a sequence that a mask hides.

A batch of texts or sounds of unlike lengths is filled up with padding. An input, the mask, marks the real positions.
The attention adds a large negative number to the scores of the other positions, or selects one, so that Softmax gives
them no weight. The model computes values at the hidden positions too, but nobody reads them. So they count neither for
ranges nor for figures.

A mask is recognised by its use: an input [N, S] from which alone, with constants, an operand of a sum or selection in
front of a Softmax is computed.

**Reads.** A convolution along the sequence, a mean over all positions or an attention without a mask reads hidden
positions, and real positions depend on what it reads. So edgeq follows the positions through the graph, operator by
operator. A tensor counts as hidden only if its hidden positions reach nothing but hidden positions of other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import Axis, Padding

from edgeq.model.axes import follow_input, is_reduction
from edgeq.model.graph import MICROSOFT, GraphIndex, captured, constant, is_op, name_of, node_input, operator_of

# Operators between the sum with the mask and the Softmax. Attention scales, moves and clips its scores.
_BETWEEN = frozenset({"Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Reshape", "Sub", "Transpose", "Where"})
# Operators that compute each position from the same position of their inputs, besides those of the operator table.
_ALONE = frozenset(
    {
        "And", "BiasGelu", "BitwiseAnd", "Cast", "CastLike", "Ceil", "Cos", "Dropout", "Equal", "Expand", "FastGelu",
        "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Mod", "Not", "Or", "PRelu",
        "Reshape", "Round", "Sign", "Sin", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Squeeze",
        "Sum", "Transpose", "Unsqueeze", "Flatten", "Where", "Xor",
    }
)  # fmt: skip
_NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
# Operators of ONNX Runtime whose result has the axes of their data.
_SHAPED = frozenset({"Attention", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
_SOFTMAX = frozenset({"LogSoftmax", "Softmax"})
# Operators that keep zeros and very low numbers where they are.
_KEEPING = frozenset(
    {"Cast", "Clip", "Div", "Dropout", "Expand", "Identity", "Max", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)

Blank = Literal["zero", "low"]
"""What a mask has put in place of the values at hidden positions."""
_Place = tuple[str, int]
"""A tensor and one of its axes."""


def find_padding(graph: GraphIndex) -> Padding:
    """Return the masks of a model and the tensors whose positions they hide."""
    return graph.once("padding", lambda: _search(graph))


def _search(graph: GraphIndex) -> Padding:
    reading = _Reading(graph)
    lengths = {name_of(value): value.shape for value in graph.graph.inputs if value.shape is not None}
    masks: dict[str, bool] = {}
    for node in graph.graph:
        for mask, hidden in _masking(node, reading):
            if len(lengths.get(mask, ())) == 2:
                masks.setdefault(mask, hidden)
    positions = _Positions(reading, masks)
    for mask in masks:
        for name, shape in lengths.items():
            # A free length without a name could be any length. A mask leads to the keys of the attention, too.
            is_named = len(shape) >= 2 and (isinstance(shape[1], int) or shape[1].value is not None)
            if name == mask or (is_named and name not in masks and shape[1] == lengths[mask][1]):
                positions.start(name, mask)
    if masks:
        for node in graph.graph:
            positions.follow(node)
    hidden_axes = positions.hidden()
    return Padding(
        masks,
        {name: axes[0] for name, axes in hidden_axes.items()},
        {name: axes[1] for name, axes in hidden_axes.items() if len(axes) > 1},
    )


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
        return self.only_name(name_of(value))

    def only_name(self, name: str) -> str | None:
        """Return what `only_input` returns, for the tensor `name`."""
        reads = self._inputs.get(name, frozenset())
        return next(iter(reads)) or None if len(reads) == 1 else None


def _masking(node: ir.Node, reading: _Reading) -> Iterator[tuple[str, bool]]:
    """Yield the inputs that mask the scores of an attention, each with the truth value that it has at hidden positions.

    Args:
        node: any node. Only a Softmax and a fused Attention have scores.
    """
    if node.op_type == "Attention" and node.domain == MICROSOFT:
        mask = reading.only_input(node_input(node, 3))
        if mask is not None:
            yield mask, False
    waiting = [node.inputs[0]] if is_op(node, "Softmax") else []
    while waiting:
        value = waiting.pop()
        maker = value.producer() if value is not None else None
        if maker is None or maker.op_type not in _BETWEEN:
            continue
        for value in maker.inputs:
            if value is None or reading.is_fixed(value):
                continue
            mask = reading.only_input(value)
            if mask is None:
                waiting.append(value)
            elif is_op(maker, "Where") and value is maker.inputs[0]:
                yield mask, _hides_if_true(value, reading) == reading.is_fixed(maker.inputs[1])
            elif is_op(maker, "Add", "Sub", "Min"):
                yield mask, _hides_if_true(value, reading)


def _hides_if_true(value: ir.Value | None, reading: _Reading) -> bool:
    """Return whether a term of the scores is far below zero where its mask is true. Each negation, and each factor
    that turns the sign around, makes the opposite true.
    """
    hides = True
    while value is not None and (node := value.producer()) is not None:
        operands = [operand for operand in node.inputs if operand is not None]
        constants = [constant(operand) for operand in operands]
        place = next((k for k, operand in enumerate(operands) if not reading.is_fixed(operand)), 0)
        factor = next((array for array in constants if array is not None and array.size), None)
        value = operands[place] if operands else None
        if is_op(node, "Where") and len(operands) == 3:
            value, low = operands[0], constants[1]
            turns = low is None or float(low.min()) >= 0
        elif is_op(node, "Mul", "Div"):
            turns = factor is not None and float(factor.min()) > 0
        elif is_op(node, "Equal"):
            turns = factor is not None and not factor.any()
        elif is_op(node, "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
            turns = (place == 0) == node.op_type.startswith("Less")
        else:
            turns = is_op(node, "Not", "Log") or (is_op(node, "Sub") and place == 1)
        hides ^= turns
    return hides


class _Positions:
    """Follow the positions that masks hide through a graph.

    Args:
        masks: see `Padding.masks`.
    """

    def __init__(self, reading: _Reading, masks: Mapping[str, bool]) -> None:
        self._reading = reading
        self._masks = masks
        self._origins: dict[str, dict[int, str]] = {}
        self._flat: set[_Place] = set()
        self._blanks: dict[_Place, Blank] = {}
        self._sources: dict[_Place, list[_Place]] = {}
        self._read: set[_Place] = set()

    def start(self, name: str, mask: str) -> None:
        """Begin at an input [N, S, ...], whose second axis `mask` hides."""
        self._origins.setdefault(name, {}).setdefault(1, mask)

    def follow(self, node: ir.Node) -> None:
        """Continue the axes of a node's inputs in its outputs. Nodes come in the order of the graph."""
        for outer in captured(node):
            self._read.update((name_of(outer), axis) for axis in self._origins.get(name_of(outer), {}))
        for place, value in enumerate(node.inputs):
            for axis, mask in tuple(self._origins.get(name_of(value), {}).items()):
                self._follow_axis(node, place, axis, mask)

    def hidden(self) -> dict[str, list[Axis]]:
        """Return tensor → the axes on which nothing else reads the hidden positions, at most two for each tensor."""
        read, waiting = set(self._read), list(self._read)
        while waiting:
            new = [source for source in self._sources.get(waiting.pop(), ()) if source not in read]
            read.update(new)
            waiting += new
        result: dict[str, list[Axis]] = {}
        for name, origins in self._origins.items():
            # Masks themselves keep all their values, and so do masked scores: their low numbers must remain known.
            axes = [
                Axis(axis, mask)
                for axis, mask in sorted(origins.items())
                if (name, axis) not in read and self._blanks.get((name, axis)) != "low"
            ]
            if axes and self._reading.only_name(name) not in self._masks:
                result[name] = axes[:2]
        return result

    def _follow_axis(self, node: ir.Node, place: int, axis: int, mask: str) -> None:
        source = (name_of(node.inputs[place]), axis)
        if is_op(node, "Shape", "Size"):
            return
        is_continued = False
        for output in node.outputs:
            moved = self._move(node, place, axis, output) if output.name else None
            if moved is None:
                continue
            is_continued = True
            target = (name_of(output), moved)
            self._origins.setdefault(target[0], {}).setdefault(moved, mask)
            blank = self._blank(node, output, moved, mask)
            if blank is not None:
                self._blanks[target] = blank
            # What a mask has blanked out does not depend on the values that were there.
            elif source not in self._blanks:
                self._sources.setdefault(target, []).append(source)
        if not is_continued and source not in self._blanks and not self._ignores(node, place, axis):
            self._read.add(source)

    def _move(self, node: ir.Node, place: int, axis: int, output: ir.Value) -> int | None:
        """Return the axis of an output that continues an input's axis position by position, or None."""
        if not _computes_alone(node, place, axis, output) and not self._is_masked_softmax(node, axis):
            return None
        # An Attention keeps the sequence, and the two tensors that a norm sums have one shape.
        if node.domain == MICROSOFT and node.op_type in _SHAPED:
            return axis
        is_flat = (name_of(node.inputs[place]), axis) in self._flat
        moved = self._move_joined(node, axis, output, is_flat) if is_op(node, "Reshape", "Flatten") else None
        if moved is not None:
            return moved
        moved = follow_input(node, place, axis, output)
        if is_flat and moved is not None:
            self._flat.add((name_of(output), moved))
        return moved

    def _move_joined(self, node: ir.Node, axis: int, output: ir.Value, is_flat: bool) -> int | None:
        """Return the axis after a Reshape that joins batch and sequence, as many exporters do in front of a layer, or
        that takes them apart. Return None for any other Reshape.
        """
        sizes, new_sizes = (list(v.shape or ()) for v in (node.inputs[0], output) if v is not None)
        if is_flat:
            return 1 if len(new_sizes) > 2 and _equal_sizes(sizes[1:], new_sizes[2:]) else None
        # With a batch of one, the sequence keeps an axis of its own.
        if axis == 1 and sizes[0] != 1 and len(new_sizes) < len(sizes) and _equal_sizes(sizes[2:], new_sizes[1:]):
            self._flat.add((name_of(output), 0))
            return 0
        return None

    def _is_masked_softmax(self, node: ir.Node, axis: int) -> bool:
        return is_op(node, *_SOFTMAX) and self._blanks.get((name_of(node.inputs[0]), axis)) == "low"

    def _blank(self, node: ir.Node, output: ir.Value, axis: int, mask: str) -> Blank | None:
        """Return what the mask has put at hidden positions of a node's output, or None for values of the model."""
        operands = [value for value in node.inputs if value is not None]
        blanks = {k: self._blanks.get((name_of(value), self._place_of(value, mask, node, k, output, axis))) for k, value
                  in enumerate(operands)}  # fmt: skip
        terms = [k for k in blanks if self._reading.only_input(operands[k]) == mask]
        terms = [k for k in terms if self._place_of(operands[k], mask, node, k, output, axis) >= 0]
        hidden = self._masks[mask]
        is_pure = len(terms) == len([k for k in blanks if not self._reading.is_fixed(operands[k])])
        if is_pure:  # only the mask itself is computed
            return None
        if is_op(node, "Add", "Sub", "Min") and terms:
            return "low"
        if is_op(node, "Mul") and any(_hides_if_true(operands[k], self._reading) != hidden for k in terms):
            return "zero"
        if is_op(node, "Where"):
            if 0 in terms:
                hides = _hides_if_true(operands[0], self._reading) == hidden
                return _kind_of_fill(operands[1 if hides else 2])
            zeros = (blanks[k] == "zero" or _is_zero(operands[k]) for k in (1, 2))
            return "zero" if all(zeros) else None
        if is_op(node, "Softmax") and blanks.get(0) == "low" and _softmax_axis(node, output) == axis:
            return "zero"
        if is_op(node, "Mul"):
            found = {blank for blank in blanks.values() if blank is not None}
            scaled = all(self._reading.is_fixed(operands[k]) for k in blanks if blanks[k] is None)
            return "zero" if "zero" in found else "low" if found and scaled else None
        if node.op_type in _KEEPING or (is_op(node, "Add", "Sub") and blanks.get(0) == "low"):
            rest = (self._reading.is_fixed(operand) for operand in operands[1:])
            return blanks.get(0) if all(rest) or blanks.get(0) == "zero" else None
        return None

    def _place_of(self, value: ir.Value, mask: str, node: ir.Node, place: int, output: ir.Value, axis: int) -> int:
        """Return the axis of an input that continues as `axis` of the output; -1 if there is none."""
        for origin_axis, origin in self._origins.get(name_of(value), {}).items():
            if origin == mask and follow_input(node, place, origin_axis, output) == axis:
                return origin_axis
        return -1

    def _ignores(self, node: ir.Node, place: int, axis: int) -> bool:
        """Return whether a node that sums over the positions, or chooses one, gives hidden positions no weight."""
        value = node.inputs[place]
        rank = len(value.shape) if value is not None and value.shape is not None else None
        if is_op(node, "MatMul") and rank is not None:
            peer = node.inputs[1 - place]
            peer_rank = len(peer.shape) if peer is not None and peer.shape is not None else 0
            # The rows of the second factor are weighted by the columns of the first, and the other way around.
            peer_axis = peer_rank - 1 if place else peer_rank - 2
            return self._blanks.get((name_of(peer), peer_axis)) == "zero"
        if is_op(node, "Gather") and not place:
            index = node.inputs[1]
            along = node.attributes.get_int("axis", 0)
            # A position that the model always reads, such as the first token, is a real one.
            return rank is not None and along % rank == axis and index is not None and index.shape is not None and (
                len(index.shape) == 0
            )  # fmt: skip
        if is_op(node, "Slice") and not place:
            shape = node.outputs[0].shape
            return shape is not None and axis < len(shape) and shape[axis] == 1
        return is_op(node, "GatherND") and not place


def _computes_alone(node: ir.Node, place: int, axis: int, output: ir.Value) -> bool:
    """Return whether a node computes each position of an input's axis from the same position alone."""
    value = node.inputs[place]
    rank = len(value.shape) if value is not None and value.shape is not None else None
    if operator_of(node).elementwise or node.op_type in _ALONE or is_reduction(node) or is_op(node, "Gemm", "MatMul"):
        return True
    if node.op_type in _NORMS and rank is not None:
        return place == 0 and axis < node.attributes.get_int("axis", -1) % rank
    if is_op(node, *_SOFTMAX) and rank is not None:
        return axis < node.attributes.get_int("axis", -1) % rank
    if is_op(node, "Concat", "Split") and rank is not None:
        return node.attributes.get_int("axis", 0) % rank != axis
    if is_op(node, "Gather"):
        return place == 1 or (rank is not None and node.attributes.get_int("axis", 0) % rank != axis)
    if is_op(node, "Slice") and rank is not None:
        axes = constant(node_input(node, 3))
        return place == 0 and axes is not None and axis not in {int(a) % rank for a in axes.ravel()}
    # A fused Attention has a mask of its own. Its sequence is the second axis of its data and of its result.
    is_masked = node.op_type == "Attention" and node.domain == MICROSOFT and node_input(node, 3) is not None
    return is_masked and place == 0 and axis == 1 and output is node.outputs[0]


def _softmax_axis(node: ir.Node, output: ir.Value) -> int | None:
    rank = len(output.shape) if output.shape is not None else 0
    return node.attributes.get_int("axis", -1) % rank if rank else None


def _kind_of_fill(value: ir.Value | None) -> Blank | None:
    """Return the kind of a number that is selected at hidden positions. It may be expanded at run time."""
    numbers = constant(value)
    while numbers is None and value is not None and (node := value.producer()) is not None:
        if is_op(node, "ConstantOfShape"):
            tensor = node.attributes.get_tensor("value", None)
            numbers = np.zeros(1) if tensor is None else tensor.numpy()
        elif not is_op(node, "Cast", "Expand", "Identity", "Reshape", "Unsqueeze"):
            break
        else:
            value = node.inputs[0]
            numbers = constant(value)
    if numbers is None or not numbers.size:
        return None
    return "low" if float(numbers.max()) < 0 else "zero" if not numbers.any() else None


def _is_zero(value: ir.Value) -> bool:
    numbers = constant(value)
    return numbers is not None and not numbers.any()


def _equal_sizes(a: Sequence[int | ir.SymbolicDim], b: Sequence[int | ir.SymbolicDim]) -> bool:
    """Return whether the axes of two shapes have the same, known number of elements."""
    numbers = [[size for size in sizes if isinstance(size, int)] for sizes in (a, b)]
    return len(numbers[0]) == len(a) and len(numbers[1]) == len(b) and math.prod(numbers[0]) == math.prod(numbers[1])
