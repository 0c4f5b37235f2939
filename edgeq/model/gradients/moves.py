"""Rules for operators that move elements, and for Resize, which mixes neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from edgeq.model.gradients.tape import Gradients, Rule, Shape, Tape, Term, first_of
from edgeq.model.graph import node_input
from edgeq.run.session import open_session


def _reshape(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    shape = tape.shape(node.inputs[0])
    same = shape == tape.shape(node.outputs[0])
    return [first_of(gradients) if same else first_of(gradients).reshape(shape)]


def _dropout(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    training = node_input(node, 2)
    # In training mode it draws random numbers.
    return None if training is not None and tape.numbers(training).any() else [gradients[0]]


def _cast(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    kind = ir.DataType(node.attributes.get_int("to", 0))
    return [gradients[0]] if kind.is_floating_point() else None


def _transpose(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    rank = len(tape.shape(node.inputs[0]))
    perm = node.attributes.get_ints("perm", list(reversed(range(rank))))
    return [first_of(gradients).transpose([int(place) for place in np.argsort(perm)])]


def _concat(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    axis = node.attributes.get_int("axis", 0)
    shapes = [tape.shape(value) for value in node.inputs]
    start, axis = tape.shape(node.outputs[0]), axis % len(shapes[0])
    begins = accumulate((shape[axis] for shape in shapes), initial=0)
    parts: list[Term | None] = []
    for value, shape, begin in zip(node.inputs, shapes, begins, strict=False):
        corner = [begin if place == axis else 0 for place in range(len(shape))]
        parts.append(_slice(first_of(gradients), start, corner, shape) if tape.is_variable(value) else None)
    return parts


def _slice(term: Term, start: Shape, begins: list[int], sizes: Shape) -> Term:
    """Return the part of a term that begins at `begins`, in the shape `sizes`."""
    axes = [axis for axis, (length, size) in enumerate(zip(start, sizes, strict=True)) if length != size]
    if not axes:
        return term
    starts, ends = [begins[axis] for axis in axes], [begins[axis] + sizes[axis] for axis in axes]
    return term.apply("Slice", *map(term.tape.indices, (starts, ends, axes)))


def _split(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    axis = node.attributes.get_int("axis", 0)
    parts = [
        tape.zeros(tape.shape(output)) if gradient is None else gradient
        for output, gradient in zip(node.outputs, gradients, strict=True)
    ]
    return [Term.of("Concat", *parts, axis=axis)]


def _slice_rule(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    if len(node.inputs) < 3:
        return None
    starts, _ = (tape.numbers(node.inputs[place]).reshape(-1).tolist() for place in (1, 2))
    axes_input, steps_input = node_input(node, 3), node_input(node, 4)
    axes = range(len(starts)) if axes_input is None else tape.numbers(axes_input).reshape(-1).tolist()
    strides = [1] * len(starts) if steps_input is None else tape.numbers(steps_input).reshape(-1).tolist()
    begins, steps = [0] * len(shape), [1] * len(shape)
    for first, axis, stride in zip(starts, axes, strides, strict=True):
        axis %= len(shape)
        if stride < 0:
            return None
        first = first + shape[axis] if first < 0 else first
        begins[axis], steps[axis] = min(max(first, 0), shape[axis]), stride
    if 0 in start:
        return [tape.zeros(shape)]
    # Beyond the last element there is nothing to spread; `fit` crops what is too long.
    spread, start = first_of(gradients).spread(start, steps)
    return [spread.fit(start, [-begin for begin in begins], shape)]


def _gather(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    if tape.is_variable(node.inputs[1]):
        return None
    shape, picked = tape.shape(node.inputs[0]), tape.shape(node.inputs[1])
    axis = node.attributes.get_int("axis", 0) % len(shape)
    before, behind, count = prod(shape[:axis]), prod(shape[axis + 1 :]), prod(picked)
    rows = tape.read(node.inputs[1]).apply("Cast", to=int(ir.DataType.INT64)).reshape((1, count, 1))
    rows, grown = rows.expand((before, count, behind)), first_of(gradients).reshape((before, count, behind))
    total = tape.zeros((before, shape[axis], behind)).apply("ScatterElements", rows, grown, axis=1, reduction="add")
    return [total.reshape(shape), None]


def _gather_elements(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    axis, shape = node.attributes.get_int("axis", 0), tape.shape(node.inputs[0])
    rows = tape.read(node.inputs[1])
    return [tape.zeros(shape).apply("ScatterElements", rows, first_of(gradients), axis=axis, reduction="add"), None]


def _gather_nd(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    if node.attributes.get_int("batch_dims", 0):
        return None
    zeros = tape.zeros(tape.shape(node.inputs[0]))
    return [zeros.apply("ScatterND", tape.read(node.inputs[1]), first_of(gradients), reduction="add"), None]


_PADDINGS = ("constant", "edge", "reflect", "wrap")
"""Modes of Pad, which numpy calls by the same names."""


def _pad(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    mode = node.attributes.get_string("mode", "constant")
    if len(node.inputs) < 2 or mode not in _PADDINGS or tape.is_variable(node_input(node, 2)):
        return None
    pads, axes_input = tape.numbers(node.inputs[1]).reshape(-1).tolist(), node_input(node, 3)
    axes = range(len(shape)) if axes_input is None else tape.numbers(axes_input).reshape(-1) % len(shape)
    both = {int(axis): (pads[place], pads[place + len(pads) // 2]) for place, axis in enumerate(axes)}
    if mode == "constant":
        return [first_of(gradients).fit(start, [both.get(axis, (0, 0))[0] for axis in range(len(shape))], shape)]
    gradient, current = first_of(gradients), start
    for axis, widths in both.items():
        if not any(widths):
            continue
        if min(widths) < 0:
            return None
        # Row i of the matrix says which element of the input the output's element i repeats.
        ends = np.pad(np.arange(shape[axis]), widths, mode)  # type: ignore[call-overload]
        gradient = gradient.along(current, axis, np.eye(shape[axis], dtype=np.float32)[ends])
        current = (*current[:axis], shape[axis], *current[axis + 1 :])
    return [gradient]


def _resize(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients | None:
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    settings = dict(node.attributes)
    cropping = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if cropping or len(node.inputs) < 3:
        return None
    axes = [axis % len(shape) for axis in node.attributes.get_ints("axes", list(range(len(shape))))]
    scales = np.ones(len(shape))
    factors = tape.numbers(node.inputs[2]).reshape(-1) if node.inputs[2] is not None else np.ones(0)
    if factors.size:
        scales[axes] = factors
    gradient, current = first_of(gradients), start
    settings = {k: v for k, v in settings.items() if k not in ("axes", "keep_aspect_ratio_policy")}
    for axis, (size, length) in enumerate(zip(shape, start, strict=True)):
        # The kernels resize axes one by one, so one matrix for each axis describes the whole.
        if size != length or scales[axis] != 1:
            scale = float(scales[axis]) if factors.size else length / size
            gradient = gradient.along(current, axis, _resizing(node, settings, size, length, scale))
            current = (*current[:axis], size, *current[axis + 1 :])
    return [gradient]


def _resizing(
    node: ir.Node, settings: Mapping[str, ir.Attr], size: int, length: int, scale: float
) -> NDArray[np.float32]:
    """Return the matrix [length, size] by which a Resize node maps an axis. The runtime's kernel resizes an identity
    matrix, so that the result follows each of its coordinate modes.
    """
    assert node.graph is not None
    attributes = [ir.to_proto(attribute) for attribute in settings.values()]
    resize = helper.make_node("Resize", ["x", "", "scales"], ["y"])
    resize.attribute.extend(attributes)
    graph = helper.make_graph(
        [resize],
        "resize",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 1, size, size])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1, size, length])],
        [helper.make_tensor("scales", onnx.TensorProto.FLOAT, [4], [1, 1, 1, scale])],
    )
    opset = max(node.graph.opset_imports.get("", 0), 11)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    identity = np.eye(size, dtype=np.float32)[None, None]
    (resized,) = open_session(model.SerializeToString()).run(None, {"x": identity})
    matrix: NDArray[np.float32] = resized[0, 0].T
    return matrix


def _expand(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    return [first_of(gradients).reduce_to(tape.shape(node.outputs[0]), tape.shape(node.inputs[0]))]


def _tile(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    shape, start = tape.shape(node.inputs[0]), tape.shape(node.outputs[0])
    pairs = [(length // size if size else 1, size) for size, length in zip(shape, start, strict=True)]
    split = first_of(gradients).reshape(tuple(n for pair in pairs for n in pair))
    return [split.sum(range(0, 2 * len(shape), 2)).reshape(shape)]


def _depth_to_space(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    batch, channels, height, width = tape.shape(node.inputs[0])
    block = node.attributes.get_int("blocksize", 1)
    split = first_of(gradients).reshape((batch, channels // block**2, height, block, width, block))
    rows_first = node.attributes.get_string("mode", "DCR") == "DCR"
    return [
        split.transpose([0, 3, 5, 1, 2, 4] if rows_first else [0, 1, 3, 5, 2, 4]).reshape(tape.shape(node.inputs[0]))
    ]


def _space_to_depth(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    return [first_of(gradients).apply("DepthToSpace", blocksize=node.attributes.get_int("blocksize", 1), mode="DCR")]


def _trilu(tape: Tape, node: ir.Node, gradients: Gradients) -> Gradients:
    place = node_input(node, 1)
    diagonal = None if place is None else tape.read(place)
    return [first_of(gradients).apply("Trilu", diagonal, upper=node.attributes.get_int("upper", 1))]


RULES: Mapping[str, Rule] = {
    "Cast": _cast,
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Identity": _reshape,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice_rule,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _reshape,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _reshape,
}
