"""Write reductions over axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order
from edgeq.backends.litert.lower import Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.model.graph import node_input

# Every other reduction is a mean.
_REDUCERS = {
    "ReduceSum": "SUM",
    "ReduceMax": "REDUCE_MAX",
    "GlobalMaxPool": "REDUCE_MAX",
    "ReduceMin": "REDUCE_MIN",
    "ReduceProd": "REDUCE_PROD",
}


def write_mean(work: Lowering, node: ir.Node) -> None:
    """Write a reduction over some axes, or over a whole image."""
    source, axes, keeps = reduction(work, node)
    # With `noop_with_empty_axes`, an empty list means no reduction at all.
    if not axes:
        work.hold(node.outputs[0], source)
        return
    kind = _REDUCERS.get(node.op_type, "MEAN")
    # A largest or smallest element is one of the input's, so it keeps the input's scale.
    like = source.tensor if kind in ("REDUCE_MAX", "REDUCE_MIN") else None
    inputs = (source.tensor, axes_of(work, source, axes))
    work.write(node, kind, inputs, order_after(source.order, axes, keeps=keeps), {"keepDims": keeps}, like=like)


def reduction(work: Lowering, node: ir.Node) -> tuple[Stored, list[int], bool]:
    """Return the input of a reduction, the axes that it reduces, and whether they stay as axes of size 1."""
    source = work.activation(node.inputs[0])
    rank = len(source.shape)
    source = work.in_order(source)
    if node.op_type.startswith("Global"):
        return source, list(range(2, rank)), True
    # In later opsets the axes are an input instead of an attribute.
    axis_values = work.constant(node.inputs[1])[0] if node_input(node, 1) is not None else None
    named = axis_values.ravel().tolist() if axis_values is not None else list(node.attributes.get_ints("axes", ()))
    if not named and not node.attributes.get_int("noop_with_empty_axes", 0):
        named = list(range(rank))
    return source, sorted(axis % rank for axis in named), bool(node.attributes.get_int("keepdims", 1))


def axes_of(work: Lowering, source: Stored, axes: Sequence[int]) -> TfliteTensor:
    """Return the constant that lists axes of the model by their places in a stored tensor."""
    return work.fixed("axes", np.array(sorted(source.order.index(axis) for axis in axes), np.int32))


def order_after(order: Order, axes: Sequence[int], *, keeps: bool) -> Order:
    """Return the order of the axes that a reduction over `axes` leaves."""
    remaining = [axis for axis in order if keeps or axis not in axes]
    return tuple(sorted(remaining).index(axis) for axis in remaining)
