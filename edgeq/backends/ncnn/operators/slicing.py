"""Write operators that take elements out of a tensor at constant places."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import onnx_ir as ir

from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Blob, Setting
from edgeq.model.graph import is_constant

_EXPLICIT_PADS = 1


def write_slice(work: NcnnLowering, node: ir.Node) -> None:
    """Write Crop, and for a step a Pooling whose window is one element."""
    shape = work.shape(node.inputs[0])
    arguments = [work.numbers(value) if value is not None else None for value in node.inputs[1:]]
    starts, ends = arguments[0], arguments[1]
    if starts is None or ends is None:
        raise NotInNcnnError("its ends are computed")
    axes = arguments[2] if len(arguments) > 2 and arguments[2] is not None else list(range(len(starts)))
    steps = arguments[3] if len(arguments) > 3 and arguments[3] is not None else [1] * len(starts)
    spans = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            raise NotInNcnnError("it has a negative step")
        place = axis % len(shape)
        # Python's rules for ends beyond the tensor are ONNX's.
        spans[place] = slice(start, end, step).indices(shape[place])
    _cut(work, node.inputs[0], node.outputs[0], spans)


def write_split(work: NcnnLowering, node: ir.Node) -> None:
    """Write a Crop for each output that is used."""
    shape = work.shape(node.inputs[0])
    axis, begin = node.attributes.get_int("axis", 0) % len(shape), 0
    for value in node.outputs:
        size = work.shape(value)[axis]
        if value.uses() or value.is_graph_output():
            _cut(work, node.inputs[0], value, {axis: (begin, begin + size, 1)})
        begin += size


def write_gather(work: NcnnLowering, node: ir.Node) -> None:
    """Write Crop for constant indices that follow each other, and a Concat of several otherwise."""
    shape, value = work.shape(node.inputs[0]), node.inputs[1]
    if not is_constant(value) or work.is_constant(node.inputs[0]):
        raise NotInNcnnError("its indices are computed, or its table is constant")
    axis = node.attributes.get_int("axis", 0) % len(shape)
    places = [place % shape[axis] for place in work.numbers(value)]
    step = places[1] - places[0] if len(places) > 1 else 1
    if places != [places[0] + step * i for i in range(len(places))] or step < 1:
        raise NotInNcnnError("its indices do not have one distance")
    _cut(work, node.inputs[0], node.outputs[0], {axis: (places[0], places[-1] + 1, step)})


def _cut(
    work: NcnnLowering, source: ir.Value | None, output: ir.Value, spans: Mapping[int, tuple[int, int, int]]
) -> None:
    """Write a slice of a tensor. `spans` maps an axis of the tensor to (begin, end, step)."""
    shape = work.shape(source)
    blob = work.image(source)
    cut = {
        work.axis(source, axis): (begin, end, step)
        for axis, (begin, end, step) in spans.items()
        if (begin, end, step) != (0, shape[axis], 1)
    }
    # The last element that a step takes, so that the window of the Pooling ends there.
    ends = {a: (b, b + max((e - b + s - 1) // s - 1, 0) * s + 1, s) for a, (b, e, s) in cut.items()}
    partial = {a: span for a, span in ends.items() if span[:2] != (0, blob.dims[a])}
    if partial:
        axes = tuple(sorted(partial))
        dims = [partial[a][1] - partial[a][0] if a in partial else size for a, size in enumerate(blob.dims)]
        settings: dict[int, Setting] = {
            9: tuple(partial[a][0] for a in axes),
            10: tuple(partial[a][1] for a in axes),
            11: axes,
        }
        blob = work.emit("Crop", (blob,), dims, settings)
    for axis, (_, _, step) in sorted(ends.items()):
        if step > 1:
            blob = take_every(work, blob, axis, step)
    work.hold(output, blob)


def take_every(work: NcnnLowering, blob: Blob, axis: int, step: int) -> Blob:
    """Return every `step`-th element along an axis, the first one included."""
    dims = blob.dims
    rows = work.shaped(blob, (prod(dims[:axis]), dims[axis], prod(dims[axis + 1 :])))
    count = (dims[axis] - 1) // step + 1
    settings: dict[int, Setting] = {0: 0, 1: 1, 11: 1, 2: 1, 12: step, 5: _EXPLICIT_PADS}
    taken = work.emit("Pooling", (rows,), (rows.dims[0], count, rows.dims[2]), settings)
    return work.shaped(taken, (*dims[:axis], count, *dims[axis + 1 :]))
