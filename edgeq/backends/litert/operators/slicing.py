"""Write operators that take elements out of a tensor at constant places, or that pad it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import model_order, stored_shape
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.padding import pad
from edgeq.model.graph import is_constant, name_of, node_input

# Begin, end and step are always given in full, so no mask is needed.
SLICING = {"beginMask": 0, "endMask": 0, "ellipsisMask": 0, "newAxisMask": 0, "shrinkAxisMask": 0, "offset": False}


def slices(
    work: Lowering, ends: Sequence[tuple[int, int]], steps: Sequence[int]
) -> tuple[TfliteTensor, TfliteTensor, TfliteTensor]:
    """Return the tensors that STRIDED_SLICE reads: begins, ends and steps."""
    columns = ([b for b, _ in ends], [e for _, e in ends], list(steps))
    begin, end, step = (
        work.fixed(name, np.array(column, np.int32))
        for name, column in zip(("begin", "end", "strides"), columns, strict=True)
    )
    return begin, end, step


def _cut(
    work: Lowering, node: ir.Node, source: Stored, spans: dict[int, tuple[int, int, int]], output: int = 0
) -> None:
    """Write a slice of a tensor. `spans` maps an axis of the model to (begin, end, step)."""
    full_spans = [spans.get(axis, (0, source.shape[axis], 1)) for axis in source.order]
    ends = [(begin, end) for begin, end, _ in full_spans]
    parts = slices(work, ends, [step for _, _, step in full_spans])
    work.write(node, "STRIDED_SLICE", (source.tensor, *parts), source.order, SLICING, like=source.tensor, output=output)


def write_slice(work: Lowering, node: ir.Node) -> None:
    """Write STRIDED_SLICE."""
    source = work.in_order(work.activation(node.inputs[0]))
    arguments = [work.constant(value)[0].ravel() if value is not None else None for value in node.inputs[1:]]
    if len(node.inputs) < 3 or arguments[0] is None or arguments[1] is None:
        raise CannotWriteError("its ends are computed")
    starts, stops = arguments[0], arguments[1]
    axes = arguments[2] if len(arguments) > 2 and arguments[2] is not None else np.arange(len(starts))
    steps = arguments[3] if len(arguments) > 3 and arguments[3] is not None else np.ones(len(starts), np.int64)
    spans = {}
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=True):
        place = int(axis) % len(source.shape)
        if step < 0:
            raise CannotWriteError("it has a negative step")
        # Python's rules for ends beyond the tensor are ONNX's.
        begin, end, stride = slice(int(start), int(stop), int(step)).indices(source.shape[place])
        spans[place] = (begin, end, stride)
    _cut(work, node, source, spans)


def write_split(work: Lowering, node: ir.Node) -> None:
    """Write a STRIDED_SLICE for each output that is used."""
    source = work.in_order(work.activation(node.inputs[0]))
    axis, begin = node.attributes.get_int("axis", 0) % len(source.shape), 0
    for place, value in enumerate(node.outputs):
        size = work.sizes(value)[axis]
        if value.uses() or value.is_graph_output():
            _cut(work, node, source, {axis: (begin, begin + size, 1)}, place)
        begin += size


def write_gather(work: Lowering, node: ir.Node) -> None:
    """Write GATHER for rows of a constant table, or for indices along an axis of an activation."""
    if is_constant(node.inputs[1]) and not work.is_constant(node.inputs[0]):
        source, (places, _) = work.in_order(work.activation(node.inputs[0])), work.constant(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(source.shape)
        size = source.shape[axis]
        # ONNX counts negative indices from the end.
        places = places % size
        if places.ndim == 1 and source.order.index(axis) >= 0:
            table = work.fixed("places", places.astype(np.int32))
            options = {"axis": source.order.index(axis), "batchDims": 0}
            work.write(node, "GATHER", (source.tensor, table), source.order, options, like=source.tensor)
            return
        # A single index drops the axis: GATHER keeps it with size 1, and a reshape removes it.
        if places.ndim == 0:
            table = work.fixed("places", places.astype(np.int32).reshape(1))
            row_shape = tuple(1 if a == axis else s for a, s in enumerate(source.shape))
            picked = work.like(source.tensor, f"{node.outputs[0].name}/one", stored_shape(row_shape, source.order))
            work.emit("GATHER", (source.tensor, table), picked, {"axis": source.order.index(axis), "batchDims": 0})
            row = Stored(picked, source.order, row_shape)
            work.hold(node.outputs[0], work.as_shape(row, work.sizes(node.outputs[0]), name_of(node.outputs[0])))
            return
    axis = node.attributes.get_int("axis", 0)
    source, places_ = work.activation(node.inputs[0]), work.stored(node.inputs[1])
    # Indices of several axes put their axes in the place of the gathered one, which only works in the model's order.
    source = work.arranged(source, model_order(len(source.shape)))
    rank = len(work.sizes(node.outputs[0]))
    options = {"axis": axis % len(source.shape), "batchDims": 0}
    places_ = work.arranged(places_, model_order(len(places_.shape)))
    work.write(node, "GATHER", (source.tensor, places_.tensor), model_order(rank), options, like=source.tensor)


def write_pad_node(work: Lowering, node: ir.Node) -> None:
    """Write PAD, PADV2 or MIRROR_PAD."""
    source, mode = work.in_order(work.activation(node.inputs[0])), node.attributes.get_string("mode", "constant")
    rank = len(source.shape)
    amounts = work.constant(node.inputs[1])[0].ravel().tolist()
    axes_value = node_input(node, 3)
    axes = [int(a) % rank for a in work.constant(axes_value)[0].ravel()] if axes_value is not None else range(rank)
    count = len(amounts) // 2
    pads = dict.fromkeys(range(rank), (0, 0)) | {
        axis: (int(amounts[i]), int(amounts[i + count])) for i, axis in enumerate(axes)
    }
    # ONNX crops with negative pads; the file's PAD does not.
    if any(min(pair) < 0 for pair in pads.values()):
        raise CannotWriteError("it has negative pads")
    table = [pads[axis] for axis in source.order]
    if mode == "reflect":
        padding = work.fixed("paddings", np.array(table, np.int32))
        options = {"mode": "REFLECT"}
        work.write(node, "MIRROR_PAD", (source.tensor, padding), source.order, options, like=source.tensor)
        return
    if mode != "constant":
        raise CannotWriteError(f"it pads in mode {mode}")
    value = node_input(node, 2)
    number = float(work.floats(value).reshape(())) if value is not None else 0.0
    work.hold(
        node.outputs[0],
        Stored(pad(work, source.tensor, table, number), source.order, work.sizes(node.outputs[0])),
    )
