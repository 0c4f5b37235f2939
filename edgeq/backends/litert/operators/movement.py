"""Write operators that move whole axes or join tensors: Reshape, Transpose, Concat and those without an effect."""

from __future__ import annotations

import onnx_ir as ir

from edgeq.backends.litert.layout import model_order, transposed
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.model.graph import is_op, name_of


def write_reshape(work: Lowering, node: ir.Node) -> None:
    """Write a RESHAPE. If only matrix products read the result, leave the features in the file's order, and reorder the
    weights of the products instead.
    """
    source, value = work.activation(node.inputs[0]), node.outputs[0]
    shape = work.sizes(value)
    # Groups of axes are found by products of sizes, which a 0 would make equal.
    if 0 in shape or 0 in source.shape:
        raise CannotWriteError("it makes a tensor without elements")
    # This is the Reshape between convolutions and products of most classifiers: without it, the last image would be
    # moved.
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
    source = work.in_order(source)
    rank = len(source.shape)
    permutation = list(node.attributes.get_ints("perm", range(rank - 1, -1, -1)))
    # The tensor is the same; only the order of its axes, seen from the model, has changed.
    work.hold(value, Stored(source.tensor, transposed(source.order, permutation), work.sizes(value)))


def write_concat(work: Lowering, node: ir.Node) -> None:
    """Write a CONCATENATION of tensors that have the same axis order. Integer tensors also need the same scale."""
    parts = [work.activation(value) for value in node.inputs]
    scales = work.parameters(node) if work.integer else None
    if scales is None and work.integer:
        raise CannotWriteError("its inputs have no common scale")
    # One order for all: that of the first input which is not in the model's.
    moving = [f for f in parts if f.order != model_order(len(f.shape))]
    order = (moving or parts)[0].order
    axis = node.attributes.get_int("axis", 0) % len(order)
    sides = [work.arranged(f if scales is None else work.requantized(f, scales), order) for f in parts]
    options = {"axis": order.index(axis), "fusedActivationFunction": "NONE"}
    tensors = [side.tensor for side in sides]
    work.write(node, "CONCATENATION", tensors, order, options, like=tensors[0])
