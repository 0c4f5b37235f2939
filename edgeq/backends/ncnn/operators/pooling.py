"""Write pooling."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Setting
from edgeq.backends.ncnn.operators.products import window_of
from edgeq.backends.ncnn.operators.slicing import take_every
from edgeq.model.graph import KernelGeometry, geometry, is_op

_MAX, _AVERAGE = 0, 1
_EXPLICIT_PADS = 1
# Number of axes of a window on images of three axes.
_SOLID = 3


def write_pool(work: NcnnLowering, node: ir.Node) -> None:
    """Write Pooling. A window on three axes may cover only one element of the first, which a slice then selects."""
    kernel = tuple(node.attributes.get_ints("kernel_shape", ()))
    source_shape, output_shape = work.shape(node.inputs[0]), work.shape(node.outputs[0])
    step = 1
    if len(kernel) == _SOLID:
        volume = geometry(node, source_shape[2:], kernel)
        if kernel[0] != 1 or any(volume.pads[0]) or source_shape[0] != 1:
            raise NotInNcnnError("its window covers several elements of three axes")
        step = volume.strides[0]
        shape = KernelGeometry(kernel[1:], volume.strides[1:], volume.dilations[1:], volume.pads[1:], 1)
        depth = source_shape[1] * source_shape[2]
        source_dims, output = (depth, *source_shape[3:]), (depth, *output_shape[3:])
    else:
        shape, source_dims, output = window_of(node, kernel, source_shape, output_shape)
    if set(shape.dilations) != {1}:
        raise NotInNcnnError("its window has dilations")
    if len(node.outputs) > 1 and node.outputs[1].uses():
        raise NotInNcnnError("its indices are read")
    average, counted = is_op(node, "AveragePool"), bool(node.attributes.get_int("count_include_pad", 0))
    pads = []
    for axis in range(2):
        # The padding at the end follows from the output's size, because ceil_mode may need more than the node states.
        before, after = shape.pads[axis]
        reach = (output[1 + axis] - 1) * shape.strides[axis] + shape.kernel[axis]
        needed = max(reach - source_dims[1 + axis] - before, 0)
        if average and counted and needed > after:
            raise NotInNcnnError("it counts padding that only ceil_mode adds")
        # A larger padding would add rows to the output.
        pads.append((before, needed))
    (top, bottom), (left, right) = pads
    settings: dict[int, Setting] = {
        0: _AVERAGE if average else _MAX,
        1: shape.kernel[1],
        11: shape.kernel[0],
        2: shape.strides[1],
        12: shape.strides[0],
        3: left,
        14: right,
        13: top,
        15: bottom,
        5: _EXPLICIT_PADS,
        6: int(counted),
    }
    source = work.shaped(work.blob(node.inputs[0]), source_dims)
    pooled = work.emit("Pooling", (source,), output, settings)
    if step > 1:
        pooled = take_every(work, work.shaped(pooled, (*source_shape[1:3], *output[1:])), 1, step)
    work.hold(node.outputs[0], pooled)


def write_global_pool(work: NcnnLowering, node: ir.Node) -> None:
    """Write global Pooling, which returns one number for each channel."""
    shape = work.shape(node.inputs[0])
    if shape[0] != 1:
        raise NotInNcnnError(f"its input has {shape[0]} images; ncnn takes one")
    source = work.shaped(work.blob(node.inputs[0]), (shape[1], int(np.prod(shape[2:-1])), shape[-1]))
    kind = _AVERAGE if is_op(node, "GlobalAveragePool") else _MAX
    work.hold(node.outputs[0], work.emit("Pooling", (source,), (shape[1],), {0: kind, 4: 1}))
