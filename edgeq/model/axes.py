"""Follow one axis of a tensor through a graph.

Two questions need this. Which axis of an output contains rows whose order depends on the values, because a TopK or a
NonMaxSuppression made them? And which axis of a tensor is the sequence, some of whose positions a mask hides?

An axis ends where an operator mixes its elements: a reduction over the axis, a product that sums over it, a Reshape
that merges it with another axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
from edgeq_device.measure.basis import Axis

from edgeq.model.graph import MAIN_DOMAINS, GraphIndex, constant, name_of, node_input, operator_of

_RANKING: Mapping[str, tuple[int, int]] = {
    # operator: the axis of its rows if no attribute sets it, and the number of outputs that contain rows
    "Compress": (0, 1),
    "NonMaxSuppression": (0, 1),
    "NonZero": (1, 1),
    "TopK": (-1, 2),
    "Unique": (0, 4),
}
_NORMS = frozenset(
    {"GroupNormalization", "InstanceNormalization", "LayerNormalization", "SimplifiedLayerNormalization"}
)
_CHOOSING = frozenset({"Gather", "GatherElements", "GatherND"})
_REDUCTIONS = frozenset({"ArgMax", "ArgMin"})


def follow_axes(graph: GraphIndex, starts: Mapping[str, Axis]) -> dict[str, Axis]:
    """Return tensor → axis, for all tensors that an axis of `starts` reaches, including `starts`."""
    axes = dict(starts)
    for node in graph.graph:
        for output in node.outputs:
            axis = _follow_node(node, output, axes) if output.name else None
            if axis is not None:
                axes.setdefault(name_of(output), axis)
    return axes


def ranked_axes(graph: GraphIndex) -> dict[str, Axis]:
    """Return tensor → axis, for the tensors whose rows along this axis are chosen or ordered by values. The origin is
    the name of the operator that orders them, with its type.
    """
    starts = {}
    for node in graph.graph:
        default, count = _RANKING.get(node.op_type, (0, 0)) if node.domain in MAIN_DOMAINS else (0, 0)
        for output in node.outputs[:count]:
            place = _count_from_front(node.attributes.get_int("axis", default), output.shape)
            if output.name and place is not None:
                # Unique's and Compress's rows are flat if no axis is given; their indices are always flat.
                flat = node.op_type == "Unique" and output is not node.outputs[0]
                starts[output.name] = Axis(0 if flat else place, f"{node.op_type} {name_of(node.outputs[0])!r}")
    return follow_axes(graph, starts) if starts else {}


def _count_from_front(place: int, shape: ir.Shape | None) -> int | None:
    """Return an axis counted from the front, or None if it counts from the end of an unknown shape."""
    if place >= 0:
        return place
    return place + len(shape) if shape is not None else None


def _rank(value: ir.Value | None) -> int | None:
    return len(value.shape) if value is not None and value.shape is not None else None


def _follow_node(node: ir.Node, output: ir.Value, axes: Mapping[str, Axis]) -> Axis | None:
    """Return the axis of a node's output that continues an axis of one of its inputs, or None."""
    inputs = list(enumerate(node.inputs))
    # Indices decide the order of the rows that they choose, whatever the order of the data was.
    for place, value in reversed(inputs[:2]) if node.op_type in _CHOOSING else inputs:
        axis = axes.get(name_of(value)) if value is not None else None
        if axis is None or value is None:
            continue
        # The first input whose axis survives decides, because a broadcast gives all inputs the same axes.
        moved = follow_input(node, place, axis.place, output)
        if moved is not None:
            return Axis(moved, axis.origin)
    return None


def follow_input(node: ir.Node, place: int, axis: int, output: ir.Value) -> int | None:
    """Return the axis of a node's output that continues `axis` of the input at `place`, or None."""
    value = node.inputs[place]
    rule = _RULES.get(node.op_type, _follow_reduction if is_reduction(node) else _align)
    return rule(node, place, axis, value, output) if value is not None else None


_Rule = Callable[[ir.Node, int, int, ir.Value, ir.Value], int | None]


def is_reduction(node: ir.Node) -> bool:
    """Return whether a node computes one number from all elements along some axes."""
    return node.op_type.startswith("Reduce") or node.op_type in _REDUCTIONS


def _align(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    """Align shapes at their ends, as broadcasting does. Elementwise operators, norms and all operators without a rule
    of their own keep the axis if the rank does not shrink.
    """
    if operator_of(node).mac_rule or (place and not (operator_of(node).elementwise or node.op_type in _ALIGNED)):
        return None
    input_rank, output_rank = _rank(value), _rank(output)
    if input_rank is None or output_rank is None:
        return axis if input_rank == output_rank else None
    return axis + output_rank - input_rank if output_rank >= input_rank else None


def _follow_gather(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    data, indices = node.inputs[0], node.inputs[1]
    along = _count_from_front(node.attributes.get_int("axis", 0), data.shape if data is not None else None)
    if along is None:
        return None
    if place == 1:
        return along + axis
    depth = _rank(indices)
    if axis == along:
        return along if depth else None
    return axis if axis < along else (axis - 1 + depth if depth is not None else None)


def _follow_slices(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    depth = _rank(value)
    return axis if place == 1 and (depth is None or axis < depth - 1) else None


def _follow_transpose(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    order = node.attributes.get_ints("perm", ())
    rank = _rank(value)
    # Without `perm`, a Transpose reverses all axes.
    if not order:
        return rank - 1 - axis if rank is not None else None
    return list(order).index(axis) if axis in order else None


def _axes_of(node: ir.Node, rank: int | None) -> list[int] | None:
    """Return the axes that an attribute or a constant second input names, counted from the front; None if unknown."""
    attribute_axes = node.attributes.get_ints("axes", ())
    axes = constant(node_input(node, 1)) if not attribute_axes else None
    if axes is None and node_input(node, 1) is not None:
        return None
    places = [int(n) for n in (attribute_axes or (axes.reshape(-1).tolist() if axes is not None else ()))]
    if any(n < 0 for n in places) and rank is None:
        return None
    return [n if n >= 0 else n + (rank or 0) for n in places]


def _follow_unsqueeze(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    rank = _rank(output)
    inserted = _axes_of(node, rank)
    if place or inserted is None:
        return None
    # In ascending order, each new axis moves those behind it by one.
    for new in sorted(inserted):
        axis += new <= axis
    return axis


def _follow_squeeze(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    removed = _axes_of(node, _rank(value))
    if place or removed is None:
        return None
    # Without axes, a Squeeze removes all axes of size 1.
    if not removed and value.shape is not None:
        removed = [k for k, size in enumerate(value.shape) if size == 1]
    return None if axis in removed else axis - sum(n < axis for n in removed)


def _follow_reduction(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    if place:
        return None
    if node.op_type in _REDUCTIONS:
        along = _count_from_front(node.attributes.get_int("axis", 0), value.shape)
        removed = [along] if along is not None else None
    else:
        removed = _axes_of(node, _rank(value))
    if not removed or axis in removed:
        return None
    return axis if node.attributes.get_int("keepdims", 1) else axis - sum(n < axis for n in removed)


def _follow_matmul(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    """Keep the rows of the first factor, the columns of the second, and the batch axes. A sum over the axis ends it."""
    input_rank, output_rank = _rank(value), _rank(output)
    if input_rank is None or output_rank is None or input_rank < 2 or place > 1:
        return None
    summed = input_rank - 1 if place == 0 else input_rank - 2
    return None if axis == summed else axis + output_rank - input_rank


def _follow_gemm(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    transposed = node.attributes.get_int("transA", 0)
    return 0 if place == 0 and axis == (1 if transposed else 0) else None


def _follow_reshape(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    """Keep an axis that has the same length in both shapes and is preceded by the same number of elements. With one
    unknown length on each side, the two unknown lengths count as equal.
    """
    if place or value.shape is None or output.shape is None:
        return None
    input_sizes, output_sizes = list(value.shape), list(output.shape)
    for candidate, size in enumerate(output_sizes):
        if _can_be_equal(size, input_sizes[axis]) and _product(input_sizes[:axis]) == _product(
            output_sizes[:candidate]
        ):
            return candidate
    equal_axes = [k for k, size in enumerate(output_sizes) if _can_be_equal(size, input_sizes[axis])]
    return equal_axes[0] if len(equal_axes) == 1 and len(input_sizes) == len(output_sizes) else None


def _can_be_equal(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return bool(a == b)
    # Two sizes without a name may be equal, and nothing contradicts it.
    return a.value == b.value or None in (a.value, b.value)


def _product(sizes: list[int | ir.SymbolicDim]) -> tuple[object, ...]:
    """Return the product of lengths in a form that can be compared: the number, and the sorted symbols."""
    number, symbols = 1, []
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            symbols.append(str(size.value))
    return (number, *sorted(symbols))


def _keep_axis(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    return axis


def _end_axis(node: ir.Node, place: int, axis: int, value: ir.Value, output: ir.Value) -> int | None:
    return None


_ALIGNED = frozenset({"And", "BitwiseAnd", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mean", "Mod",
                      "Or", "PRelu", "Sum", "Where", "Xor", *_NORMS})  # fmt: skip
_RULES: Mapping[str, _Rule] = {
    "Concat": _keep_axis,
    "Flatten": _follow_reshape,
    "Gather": _follow_gather,
    "GatherElements": _keep_axis,
    "GatherND": _follow_slices,
    "Gemm": _follow_gemm,
    "MatMul": _follow_matmul,
    "Reshape": _follow_reshape,
    "ScatterElements": _end_axis,
    "ScatterND": _end_axis,
    "Shape": _end_axis,
    "Size": _end_axis,
    "Squeeze": _follow_squeeze,
    "Transpose": _follow_transpose,
    "Unsqueeze": _follow_unsqueeze,
}
