"""Write pooling, resizing and the exchange between channels and pixels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.padding import pad
from edgeq.backends.litert.operators.slicing import SLICING, slices
from edgeq.backends.litert.operators.windows import (
    NHWC,
    SAME,
    VALID,
    image,
    same_pads,
    strides,
    window,
    with_padding,
    write_image,
)
from edgeq.model.graph import KernelGeometry


def write_pool(work: Lowering, node: ir.Node) -> None:
    """Write MAX_POOL_2D or AVERAGE_POOL_2D."""
    if len(node.outputs) > 1 and node.outputs[1].uses():
        raise CannotWriteError("its second output, the indices of the maxima, is read")
    source = image(work, node)
    shape = window(node, source, node.attributes.get_ints("kernel_shape", ()))
    kernel = shape.kernel
    largest = node.op_type == "MaxPool"
    # The file's pooling has no dilation.
    if set(shape.dilations) != {1}:
        raise CannotWriteError(f"it has dilations {list(shape.dilations)}")
    # The largest element must never be one of the padding.
    padded, padding = with_padding(work, node, source, shape, lowest=largest)
    counts_pads = node.attributes.get_int("count_include_pad", 0)
    # The kernels never count the padding of SAME in an average, so zeros that count are real elements.
    if not largest and padding == SAME and counts_pads:
        pads = [(0, 0), *(same_pads(source.shape[2 + a], kernel[a], shape.strides[a]) for a in range(2)), (0, 0)]
        padded, padding = pad(work, source.tensor, pads, 0.0), VALID
    # Zeros written by a PAD do count, and the kernels have no way to leave them out.
    elif not largest and padded is not source.tensor and not (counts_pads and _within(shape, source, padded)):
        raise CannotWriteError("its padding differs from SAME and does not count in its averages")
    options = {"padding": padding, **strides(shape), "filterHeight": kernel[0], "filterWidth": kernel[1]}
    kind = "MAX_POOL_2D" if largest else "AVERAGE_POOL_2D"
    write_image(work, node, kind, (padded,), options, like=padded)


def _within(shape: KernelGeometry, source: Stored, padded: TfliteTensor) -> bool:
    """Return whether every window stays within the padding that the node itself sets."""
    return all(padded.shape[1 + axis] <= source.shape[2 + axis] + sum(shape.pads[axis]) for axis in range(2))


def write_resize(work: Lowering, node: ir.Node) -> None:
    """Write RESIZE_NEAREST_NEIGHBOR or RESIZE_BILINEAR, if it samples at the same positions as the node."""
    source, new_shape = image(work, node), work.sizes(node.outputs[0])
    if new_shape[:2] != source.shape[:2]:
        raise CannotWriteError("it resizes channels")
    mode = node.attributes.get_string("mode", "nearest")
    transformation = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    rounding = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    size = work.fixed("size", np.array(new_shape[2:], np.int32))
    is_multiple = all(new % old == 0 for new, old in zip(new_shape[2:], source.shape[2:], strict=True))
    if mode == "nearest":
        # The kernel takes the element at floor(position / ratio). These two combinations give the same element.
        by_floor = transformation == "asymmetric" and rounding == "floor"
        by_half = transformation in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer")
        if not (by_floor or (by_half and is_multiple)):
            raise CannotWriteError(f"with {transformation} and {rounding} the file would choose other nearest elements")
        options = {"alignCorners": False, "halfPixelCenters": False}
        work.write(node, "RESIZE_NEAREST_NEIGHBOR", (source.tensor, size), NHWC, options, like=source.tensor)
        return
    # alignCorners and halfPixelCenters.
    flags = {"half_pixel": (False, True), "align_corners": (True, False), "asymmetric": (False, False)}
    if mode != "linear" or transformation.replace("pytorch_", "") not in flags:
        raise CannotWriteError(f"the file cannot resize with {mode} and {transformation}")
    corners, half = flags[transformation.replace("pytorch_", "")]
    options = {"alignCorners": corners, "halfPixelCenters": half}
    work.write(node, "RESIZE_BILINEAR", (source.tensor, size), NHWC, options, like=source.tensor)


def write_depth_to_space(work: Lowering, node: ir.Node) -> None:
    """Write DEPTH_TO_SPACE. In the file, the index inside a block comes before the channel."""
    source, block = image(work, node), node.attributes.get_int("blocksize", 1)
    if node.attributes.get_string("mode", "DCR") != "DCR":
        # In the file, the index inside a block comes before the channel.
        channels = source.shape[1]
        places = np.arange(channels, dtype=np.int32).reshape(-1, block * block).T.ravel()
        moved = work.like(source.tensor, f"{node.outputs[0].name}/channels", source.tensor.shape)
        table = work.fixed("places", places)
        source = Stored(
            work.emit("GATHER", (source.tensor, table), moved, {"axis": 3, "batchDims": 0}), NHWC, source.shape
        )
    work.write(node, "DEPTH_TO_SPACE", (source.tensor,), NHWC, {"blockSize": block}, like=source.tensor)


def write_space_to_depth(work: Lowering, node: ir.Node) -> None:
    """Write strided slices instead of SPACE_TO_DEPTH, because more hardware supports them."""
    source, block = image(work, node), node.attributes.get_int("blocksize", 1)
    n, c, h, w = source.shape
    parts = []
    for row in range(block):
        for column in range(block):
            ends = [(0, n), (row, h), (column, w), (0, c)]
            part = work.like(source.tensor, f"{node.outputs[0].name}/{row}{column}", (n, h // block, w // block, c))
            inputs = (source.tensor, *slices(work, ends, [1, block, block, 1]))
            parts.append(work.emit("STRIDED_SLICE", inputs, part, SLICING))
    options = {"axis": 3, "fusedActivationFunction": "NONE"}
    work.write(node, "CONCATENATION", parts, NHWC, options, like=source.tensor)
