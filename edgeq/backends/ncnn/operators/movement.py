"""Write operators that move or select elements."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.dialect import dialect
from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError, dims_of
from edgeq.backends.ncnn.network import Setting
from edgeq.model.graph import node_input

# The letters of the axes of a blob, the last axis first, by number of axes. The parameters of Permute use them.
_LETTERS = ("w", "wh", "whc", "whdc")


def write_alias(work: NcnnLowering, node: ir.Node) -> None:
    """Write no layer: the elements stay the same."""
    work.hold(node.outputs[0], work.blob(node.inputs[0]))


def write_cast(work: NcnnLowering, node: ir.Node) -> None:
    """Write no layer for a Cast between types of floats, all of which are float32 in the file."""
    if node.attributes.get_int("to", 0) != ir.DataType.FLOAT:
        raise NotInNcnnError("it casts to another type than float32")
    write_alias(work, node)


def write_dropout(work: NcnnLowering, node: ir.Node) -> None:
    """Write no layer for a Dropout in inference."""
    training = node_input(node, 2)
    if training is not None and (not work.is_constant(training) or np.any(work.floats(training))):
        raise NotInNcnnError("it draws random numbers")
    write_alias(work, node)


def write_concat(work: NcnnLowering, node: ir.Node) -> None:
    """Write Concat."""
    axis, shape = node.attributes.get_int("axis", 0), work.shape(node.outputs[0])
    if axis % len(shape) or len(shape) == 1:
        place, dims = work.axis(node.inputs[0], axis), dims_of(shape)
        blobs = [work.image(value) for value in node.inputs]
    else:
        # Along the batch, which blobs otherwise leave out.
        place, dims = 0, shape
        blobs = [work.shaped(work.blob(value), work.shape(value)) for value in node.inputs]
    work.hold(node.outputs[0], work.emit("Concat", blobs, dims, {0: place}))


def write_transpose(work: NcnnLowering, node: ir.Node) -> None:
    """Write Permute, or no layer if no element moves."""
    shape = work.shape(node.inputs[0])
    order = list(node.attributes.get_ints("perm", list(reversed(range(len(shape))))))
    # Axes of size 1 move no element, and neighbours that stay together count as one axis.
    runs: list[list[int]] = []
    for axis in (axis for axis in order if shape[axis] != 1):
        last = runs[-1][-1] if runs else None
        between = range(last + 1, axis) if last is not None and last < axis else None
        if between is not None and all(shape[skipped] == 1 for skipped in between):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    if len(runs) < 2:
        work.hold(node.outputs[0], work.blob(node.inputs[0]))
        return
    stored = sorted(runs)
    if len(runs) > dialect().most_axes:
        raise NotInNcnnError(f"it moves {len(runs)} axes; ncnn moves up to {dialect().most_axes}")
    dims = [prod(shape[axis] for axis in run) for run in stored]
    letters = _LETTERS[len(runs) - 1]
    # `letters` counts from the last axis, and so do the names of the orders.
    moved = "".join(letters[len(runs) - 1 - stored.index(run)] for run in reversed(runs))
    source = work.shaped(work.blob(node.inputs[0]), dims)
    output = [prod(shape[axis] for axis in run) for run in runs]
    settings: dict[int, Setting] = {0: dialect().permute[len(runs) - 1].index(moved)}
    work.hold(node.outputs[0], work.emit("Permute", (source,), output, settings))


def write_expand(work: NcnnLowering, node: ir.Node) -> None:
    """Write Tile, or no layer if nothing is repeated."""
    shape, output = work.shape(node.inputs[0]), work.shape(node.outputs[0])
    source = work.blob(node.inputs[0])
    if prod(shape) != prod(output):
        dims = dims_of(output)
        rank = len(dims)
        source_dims = (*[1] * (rank - len(shape)), *shape)[-rank:]
        repeats = tuple(size // have for size, have in zip(dims, source_dims, strict=True))
        source = work.emit("Tile", (work.shaped(source, source_dims),), dims, {2: repeats})
    work.hold(node.outputs[0], source)


def write_tile(work: NcnnLowering, node: ir.Node) -> None:
    """Write Tile."""
    shape, repeats = work.shape(node.inputs[0]), work.numbers(node.inputs[1])
    dropped = len(shape) - len(dims_of(shape))
    if any(count != 1 for count in repeats[:dropped]):
        raise NotInNcnnError("it repeats the batch")
    source = work.image(node.inputs[0])
    counts = tuple(repeats[dropped:])
    dims = [size * count for size, count in zip(source.dims, counts, strict=True)]
    work.hold(node.outputs[0], work.emit("Tile", (source,), dims, {2: counts}))
