"""Write pooling, resizing, and operators that only move elements."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import model_order, stored_shape, transposed
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.shared import (
    NHWC,
    SAME,
    SLICING,
    VALID,
    image,
    pad,
    same_pads,
    slices,
    strides,
    window,
    with_padding,
    write_image,
)
from edgeq.model.graph import KernelGeometry, is_constant, is_op, name_of, node_input


def write_pool(work: Lowering, node: ir.Node) -> None:
    """Write MAX_POOL_2D or AVERAGE_POOL_2D."""
    if len(node.outputs) > 1 and node.outputs[1].uses():
        raise CannotWriteError("its second output, the indices of the maxima, is read")
    source = image(work, node)
    shape = window(node, source, node.attributes.get_ints("kernel_shape", ()))
    kernel = shape.kernel
    largest = node.op_type == "MaxPool"
    if set(shape.dilations) != {1}:
        raise CannotWriteError(f"it has dilations {list(shape.dilations)}")
    padded, padding = with_padding(work, node, source, shape, lowest=largest)
    counts_pads = node.attributes.get_int("count_include_pad", 0)
    if not largest and padding == SAME and counts_pads:
        pads = [(0, 0), *(same_pads(source.shape[2 + a], kernel[a], shape.strides[a]) for a in range(2)), (0, 0)]
        padded, padding = pad(work, source.tensor, pads, 0.0), VALID
    elif not largest and padded is not source.tensor and not (counts_pads and _within(shape, source, padded)):
        raise CannotWriteError("its padding differs from SAME and does not count in its averages")
    options = {"padding": padding, **strides(shape), "filterHeight": kernel[0], "filterWidth": kernel[1]}
    kind = "MAX_POOL_2D" if largest else "AVERAGE_POOL_2D"
    write_image(work, node, kind, (padded,), options, like=padded)


def _within(shape: KernelGeometry, source: Stored, padded: TfliteTensor) -> bool:
    """Return whether every window stays within the padding that the node itself sets."""
    return all(padded.shape[1 + axis] <= source.shape[2 + axis] + sum(shape.pads[axis]) for axis in range(2))


def write_reshape(work: Lowering, node: ir.Node) -> None:
    """Write a RESHAPE. If only matrix products read the result, leave the features in the file's order, and reorder the
    weights of the products instead.
    """
    source, value = work.activation(node.inputs[0]), node.outputs[0]
    shape = work.sizes(value)
    if 0 in shape or 0 in source.shape:
        raise CannotWriteError("it makes a tensor without elements")
    flat = len(shape) == 2 and source.shape[0] == shape[0] and value.uses()
    if flat and not value.is_graph_output() and _only_products(work, value):
        work.hold(value, work.flattened(source, name_of(value)))
    else:
        work.hold(value, work.as_shape(source, shape, name_of(value)))


def _only_products(work: Lowering, value: ir.Value) -> bool:
    """Return whether all readers of a tensor are products with constant weights. Such products accept the features in
    any order.

    Q/DQ, Identity and Dropout nodes may be between the tensor and its readers.
    """
    for use in value.uses():
        node = use.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Identity", "Dropout"):
            result = node.outputs[0]
            if result.is_graph_output() or not result.uses() or not _only_products(work, result):
                return False
        else:
            product = is_op(node, "Gemm", "MatMul") and use.idx == 0 and node.attributes.get_int("transA", 0) == 0
            if not product or not work.is_constant(node.inputs[1]) or len(work.sizes(node.inputs[1])) != 2:
                return False
    return True


def write_identity(work: Lowering, node: ir.Node) -> None:
    """Use the input as the output."""
    work.hold(node.outputs[0], work.activation(node.inputs[0]))


def write_transpose(work: Lowering, node: ir.Node) -> None:
    """Record that the axes are in another order, and write nothing."""
    source, value = work.activation(node.inputs[0]), node.outputs[0]
    if source.features is not None:
        source = work.arranged(source, model_order(2))
    rank = len(source.shape)
    permutation = list(node.attributes.get_ints("perm", range(rank - 1, -1, -1)))
    work.hold(value, Stored(source.tensor, transposed(source.order, permutation), work.sizes(value)))


def write_concat(work: Lowering, node: ir.Node) -> None:
    """Write a CONCATENATION of tensors that have the same axis order. Integer tensors also need the same scale."""
    parts = [work.activation(value) for value in node.inputs]
    scales = work.parameters(node) if work.integer else None
    if scales is None and work.integer:
        raise CannotWriteError("its inputs have no common scale")
    moving = [f for f in parts if f.order != model_order(len(f.shape))]
    order = (moving or parts)[0].order
    axis = node.attributes.get_int("axis", 0) % len(order)
    sides = [work.arranged(f if scales is None else work.requantized(f, scales), order) for f in parts]
    options = {"axis": order.index(axis), "fusedActivationFunction": "NONE"}
    tensors = [side.tensor for side in sides]
    work.write(node, "CONCATENATION", tensors, order, options, like=tensors[0])


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
    source = _whole(work, node)
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
        begin, end, stride = slice(int(start), int(stop), int(step)).indices(source.shape[place])
        spans[place] = (begin, end, stride)
    _cut(work, node, source, spans)


def write_split(work: Lowering, node: ir.Node) -> None:
    """Write a STRIDED_SLICE for each output that is used."""
    source = _whole(work, node)
    axis, begin = node.attributes.get_int("axis", 0) % len(source.shape), 0
    for place, value in enumerate(node.outputs):
        size = work.sizes(value)[axis]
        if value.uses() or value.is_graph_output():
            _cut(work, node, source, {axis: (begin, begin + size, 1)}, place)
        begin += size


def _whole(work: Lowering, node: ir.Node) -> Stored:
    stored = work.activation(node.inputs[0])
    return work.arranged(stored, model_order(2)) if stored.features is not None else stored


def write_gather(work: Lowering, node: ir.Node) -> None:
    """Write GATHER for rows of a constant table, or for indices along an axis of an activation."""
    if is_constant(node.inputs[1]) and not work.is_constant(node.inputs[0]):
        source, (places, _) = _whole(work, node), work.constant(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(source.shape)
        size = source.shape[axis]
        places = places % size
        if places.ndim == 1 and source.order.index(axis) >= 0:
            table = work.fixed("places", places.astype(np.int32))
            options = {"axis": source.order.index(axis), "batchDims": 0}
            work.write(node, "GATHER", (source.tensor, table), source.order, options, like=source.tensor)
            return
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
    source = work.arranged(source, model_order(len(source.shape)))
    rank = len(work.sizes(node.outputs[0]))
    options = {"axis": axis % len(source.shape), "batchDims": 0}
    places_ = work.arranged(places_, model_order(len(places_.shape)))
    work.write(node, "GATHER", (source.tensor, places_.tensor), model_order(rank), options, like=source.tensor)


def write_pad_node(work: Lowering, node: ir.Node) -> None:
    """Write PAD, PADV2 or MIRROR_PAD."""
    source, mode = _whole(work, node), node.attributes.get_string("mode", "constant")
    rank = len(source.shape)
    amounts = work.constant(node.inputs[1])[0].ravel().tolist()
    axes_value = node_input(node, 3)
    axes = [int(a) % rank for a in work.constant(axes_value)[0].ravel()] if axes_value is not None else range(rank)
    count = len(amounts) // 2
    pads = dict.fromkeys(range(rank), (0, 0)) | {
        axis: (int(amounts[i]), int(amounts[i + count])) for i, axis in enumerate(axes)
    }
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
        by_floor = transformation == "asymmetric" and rounding == "floor"
        by_half = transformation in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer")
        if not (by_floor or (by_half and is_multiple)):
            raise CannotWriteError(f"with {transformation} and {rounding} the file would choose other nearest elements")
        options = {"alignCorners": False, "halfPixelCenters": False}
        work.write(node, "RESIZE_NEAREST_NEIGHBOR", (source.tensor, size), NHWC, options, like=source.tensor)
        return
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
