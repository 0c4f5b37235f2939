"""Write operators that choose elements: by a condition, by rank, or by computed indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.litert.layout import model_order, stored_shape
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.arithmetic import ACTIVATED, broadcast, refuse_large
from edgeq.backends.litert.operators.reductions import order_after
from edgeq.model.graph import name_of, node_input


def write_where(work: Lowering, node: ir.Node) -> None:
    """Write SELECT_V2."""
    if work.integer:
        raise CannotWriteError("its inputs have no common scale")
    sides, order = broadcast(work, node)
    work.write(node, "SELECT_V2", [side.tensor for side in sides], order)


def write_trilu(work: Lowering, node: ir.Node) -> None:
    """Write SELECT_V2 with a constant mask of the triangle."""
    if work.integer:
        raise CannotWriteError("it has no int8 kernel")
    source, diagonal = work.activation(node.inputs[0]), node_input(node, 1)
    source = work.arranged(source, model_order(len(source.shape)))
    k = int(work.constant(diagonal)[0].reshape(())) if diagonal is not None else 0
    rows, columns = source.shape[-2:]
    # The mask becomes a constant that the model does not contain.
    refuse_large((rows, columns))
    upper = bool(node.attributes.get_int("upper", 1))
    mask = np.triu(np.ones((rows, columns), bool), k) if upper else np.tril(np.ones((rows, columns), bool), k)
    ones = (1,) * (len(source.shape) - 2)
    table = work.fixed(f"{node.name}/mask", mask.reshape(*ones, rows, columns))
    zero = work.fixed(f"{node.name}/zero", np.zeros((*ones, 1, 1), np.dtype(source.tensor.type)))
    work.write(node, "SELECT_V2", (table, source.tensor, zero), source.order)


def write_arg(work: Lowering, node: ir.Node) -> None:
    """Write ARG_MAX or ARG_MIN. Integers have the same order as the numbers that they represent."""
    if node.attributes.get_int("select_last_index", 0):
        raise CannotWriteError("it selects the last of equal elements, and the file's operator selects the first")
    source = work.in_order(work.stored(node.inputs[0]))
    rank, value = len(source.shape), node.outputs[0]
    axis, kind = node.attributes.get_int("axis", 0) % rank, "ARG_MAX" if node.op_type == "ArgMax" else "ARG_MIN"
    order = order_after(source.order, [axis], keeps=False)
    shape = tuple(size for place, size in enumerate(source.shape) if place != axis)
    place = work.fixed("axis", np.array(source.order.index(axis), np.int32))
    result = _int32(work, f"{name_of(value)}/place", stored_shape(shape, order))
    work.emit(kind, (source.tensor, place), result, {"outputType": "INT32"})
    work.hold(value, work.as_shape(Stored(result, order, shape), work.sizes(value), name_of(value)))


def write_top_k(work: Lowering, node: ir.Node) -> None:
    """Write TOPK_V2, which works on the last axis of the file's tensor. For the smallest elements, it reads the
    negated tensor.
    """
    largest = bool(node.attributes.get_int("largest", 1))
    source = work.in_order(work.stored(node.inputs[0])) if largest else work.activation(node.inputs[0])
    rank = len(source.shape)
    axis = node.attributes.get_int("axis", -1) % rank
    count = int(work.constant(node.inputs[1])[0].reshape(()))
    # TOPK_V2 has no axis.
    source = work.arranged(source, (*(a for a in source.order if a != axis), axis))
    shape = tuple(count if place == axis else size for place, size in enumerate(source.shape))
    table, name = work.fixed("k", np.array(count, np.int32)), name_of(node.outputs[0])
    data = source.tensor
    if not largest:
        # The file has no operator for the smallest elements.
        data = work.emit("NEG", (data,), work.like(data, f"{name}/negated", data.shape))
    result = work.like(data, f"{name}/top", stored_shape(shape, source.order))
    places = _int32(work, f"{name}/places", result.shape)
    work.emit("TOPK_V2", (data, table), result, None, places)
    if not largest:
        result = work.emit("NEG", (result,), work.like(result, f"{name}/bottom", result.shape))
    for value, tensor in zip(node.outputs, (result, places), strict=False):
        work.hold(value, Stored(tensor, source.order, shape))


def write_gather_nd(work: Lowering, node: ir.Node) -> None:
    """Write GATHER_ND."""
    if node.attributes.get_int("batch_dims", 0):
        raise CannotWriteError("it has batch_dims, which GATHER_ND does not support")
    source = _in_plain_order(work, node.inputs[0])
    depth = work.sizes(node.inputs[1])[-1]
    places = _places(work, node.inputs[1], np.array(source.shape[:depth], np.int32))
    rank = len(work.sizes(node.outputs[0]))
    work.write(node, "GATHER_ND", (source.tensor, places), model_order(rank), like=source.tensor)


def write_gather_elements(work: Lowering, node: ir.Node) -> None:
    """Write a GATHER from the flat tensor."""
    source, shape = _in_plain_order(work, node.inputs[0]), work.sizes(node.inputs[1])
    rank, name = len(shape), name_of(node.outputs[0])
    axis = node.attributes.get_int("axis", 0) % rank
    # GATHER takes one index for an element, so the index of each axis becomes a place in the flat tensor.
    strides = [int(np.prod(source.shape[place + 1 :])) for place in range(rank)]
    places = _places(work, node.inputs[1], np.array(source.shape[axis], np.int32))
    refuse_large(shape)
    # The other axes keep their own position, which is known now, so only the indices are left to add at run time.
    grid = np.indices(shape)
    offsets = sum((grid[place] * strides[place] for place in range(rank) if place != axis), np.zeros(shape, np.int64))
    if places.values is not None:
        flat = work.fixed(f"{name}/places", places.values.astype(np.int64) * strides[axis] + offsets)
    else:
        stride = work.fixed("stride", np.full((1,) * rank, strides[axis], np.int32))
        scaled = _integers(work, "MUL", places, stride, f"{name}/scaled")
        flat = _integers(work, "ADD", scaled, work.fixed(f"{name}/others", offsets), f"{name}/places")
    row = work.as_shape(source, (int(np.prod(source.shape)),), f"{name}/flat")
    work.write(node, "GATHER", (row.tensor, flat), model_order(rank), {"axis": 0, "batchDims": 0}, like=source.tensor)


def write_one_hot(work: Lowering, node: ir.Node) -> None:
    """Write ONE_HOT. A negative index counts from the end."""
    # The size of the output depends on it, and sizes in a file are fixed.
    depth = int(work.constant(node.inputs[1])[0].reshape(()))
    off, on = work.constant(node.inputs[2])[0].ravel()
    places = _places(work, node.inputs[0], np.array(depth, np.int32))
    rank = len(work.sizes(node.outputs[0]))
    axis = node.attributes.get_int("axis", -1)
    scalars = [work.fixed(text, np.asarray(value)) for text, value in (("on", on), ("off", off))]
    inputs = (places, work.fixed("depth", np.array(depth, np.int32)), *scalars)
    work.write(node, "ONE_HOT", inputs, model_order(rank), {"axis": -1 if axis % rank == rank - 1 else axis % rank})


def write_cum_sum(work: Lowering, node: ir.Node) -> None:
    """Write CUMSUM."""
    if work.integer:
        raise CannotWriteError("it has no int8 kernel")
    source = work.in_order(work.activation(node.inputs[0]))
    axis = int(work.constant(node.inputs[1])[0].reshape(())) % len(source.shape)
    place = work.fixed("axis", np.array(source.order.index(axis), np.int32))
    options = {name: bool(node.attributes.get_int(name, 0)) for name in ("exclusive", "reverse")}
    work.write(node, "CUMSUM", (source.tensor, place), source.order, options)


def write_tile(work: Lowering, node: ir.Node) -> None:
    """Write TILE."""
    source, counts = work.in_order(work.stored(node.inputs[0])), work.constant(node.inputs[1])[0].ravel()
    table = work.fixed("multiples", counts[list(source.order)].astype(np.int32))
    work.write(node, "TILE", (source.tensor, table), source.order, like=source.tensor)


def write_expand(work: Lowering, node: ir.Node) -> None:
    """Write BROADCAST_TO."""
    source, shape = work.in_order(work.stored(node.inputs[0])), work.sizes(node.outputs[0])
    missing = len(shape) - len(source.shape)
    if missing:
        source = work.as_shape(source, (*[1] * missing, *source.shape), f"{source.tensor.name}/raised")
    if source.shape == shape:
        work.hold(node.outputs[0], source)
        return
    table = work.fixed("shape", np.array(stored_shape(shape, source.order), np.int32))
    work.write(node, "BROADCAST_TO", (source.tensor, table), source.order, like=source.tensor)


def write_constant_of_shape(work: Lowering, node: ir.Node) -> None:
    """Use a constant as the output."""
    attribute = node.attributes.get("value")
    value = np.asarray(attribute.as_tensor().numpy()).reshape(()) if attribute is not None else np.float32(0)
    shape = work.sizes(node.outputs[0])
    refuse_large(shape)
    tensor = work.fixed(name_of(node.outputs[0]), np.full(shape, value))
    work.hold(node.outputs[0], Stored(tensor, model_order(len(shape)), shape))


def _in_plain_order(work: Lowering, value: ir.Value | None) -> Stored:
    stored = work.stored(value)
    return work.arranged(stored, model_order(len(stored.shape)))


def _places(work: Lowering, value: ir.Value | None, sizes: NDArray[Any]) -> TfliteTensor:
    """Return indices as int32. A size is added to those that count from the end.

    Args:
        sizes: the sizes of the indexed axes. They broadcast to the indices.
    """
    places, name = _in_plain_order(work, value).tensor, name_of(value)
    # int64 became int32 already, so any other type is one that cannot be an index.
    if places.type != "int32":
        raise CannotWriteError(f"its indices are of type {places.type}")
    # Constant indices are corrected once, here.
    if places.values is not None:
        return work.fixed(name, np.where(places.values < 0, places.values + sizes, places.values))
    ones = (1,) * len(places.shape)
    negative = work.like(TfliteTensor("", (), "bool"), f"{name}/negative", places.shape)
    # ONNX counts negative indices from the end. The file's operators do not, so 1 times the size is added where an
    # index is negative.
    work.emit("LESS", (places, work.fixed("zero", np.zeros(ones, np.int32))), negative)
    flags = _int32(work, f"{name}/counted", places.shape)
    work.emit("CAST", (negative,), flags, {"inDataType": "BOOL", "outDataType": "INT32"})
    wide = work.fixed("sizes", np.broadcast_to(sizes, (*ones[:-1], sizes.size)))
    return _integers(work, "ADD", places, _integers(work, "MUL", flags, wide, f"{name}/added"), f"{name}/places")


def _integers(work: Lowering, kind: str, lhs: TfliteTensor, rhs: TfliteTensor, name: str) -> TfliteTensor:
    """Write an operator on two tensors of int32."""
    return work.emit(kind, (lhs, rhs), _int32(work, name, lhs.shape), ACTIVATED.get(kind))


def _int32(work: Lowering, name: str, shape: tuple[int, ...]) -> TfliteTensor:
    return work.like(TfliteTensor("", (), "int32"), name, shape)
