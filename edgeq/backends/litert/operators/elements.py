"""Write operators that work on each element, along one axis, or over a whole image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order, model_order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import Scales, TfliteTensor
from edgeq.backends.litert.operators.shared import (
    filler_of,
)
from edgeq.model.graph import clamp_bounds, name_of, node_input


def write_binary(kind: str) -> Callable[[Lowering, ir.Node], None]:
    """Return a function that writes an operator on broadcast tensors as `kind`, which joins two tensors. For further
    tensors, more operators follow.
    """

    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator on broadcast tensors."""
        sides, order = broadcast(work, node)
        scales = work.parameters(node)
        if scales is not None and kind in ("MAXIMUM", "MINIMUM"):
            sides = [work.requantized(side, scales) for side in sides]
        elif scales is not None and len(sides) != 2:
            raise CannotWriteError("its partial results have no scale")
        current, last_side = sides[0].tensor, sides[-1]
        if len(sides) == 1:
            work.hold(node.outputs[0], last_side)
            return
        for place, side in enumerate(sides[1:-1]):
            shape = np.broadcast_shapes(current.shape, side.tensor.shape)
            partial = work.partial(f"{node.outputs[0].name}/{place}", shape, scales, work.type_of(node.outputs[0]))
            current = work.emit(kind, (current, side.tensor), partial, ACTIVATED.get(kind))
        work.write(node, kind, (current, last_side.tensor), order, ACTIVATED.get(kind))

    return write


ACTIVATED: dict[str, dict[str, Any]] = {
    kind: {"fusedActivationFunction": "NONE"} for kind in ("ADD", "SUB", "MUL", "DIV")
}


def broadcast(work: Lowering, node: ir.Node) -> tuple[list[Stored], Order]:
    """Return all inputs of a node with their axes in one common order, and that order."""
    rank = len(work.sizes(node.outputs[0]))
    inputs: list[Stored | None] = [None if work.is_constant(v) else work.activation(v) for v in node.inputs]
    raised = [_raised(work, value, rank) for value in inputs if value is not None]
    moving = [value for value in raised if value.order != model_order(rank)]
    # The larger input keeps its order.
    order = max(moving or raised, key=lambda value: int(np.prod(value.shape))).order if raised else model_order(rank)
    sides = []
    for value, stored in zip(node.inputs, inputs, strict=True):
        if stored is None:
            sides.append(constant_side(work, value, rank, order))
        else:
            sides.append(work.arranged(_raised(work, stored, rank), order))
    return sides, order


def _raised(work: Lowering, stored: Stored, rank: int) -> Stored:
    missing = rank - len(stored.shape)
    return work.as_shape(stored, (*[1] * missing, *stored.shape), f"{stored.tensor.name}/raised") if missing else stored


def constant_side(work: Lowering, value: ir.Value | None, rank: int, order: Order) -> Stored:
    """Return a constant raised to `rank` axes, which are in `order`."""
    values, scales = work.constant(value) if work.integer else (work.floats(value), None)
    if scales is not None and scales.scale.size > 1:
        raise CannotWriteError("it reads a constant with a scale for each channel")
    raised = values.reshape((1,) * (rank - values.ndim) + values.shape)
    stored = raised.transpose(order) if values.size > 1 else values.reshape((1,) * rank)
    return Stored(work.fixed(name_of(value), stored, scales), order, raised.shape)


_MOST_ELEMENTS = 1 << 24


def refuse_large(shape: Sequence[int]) -> None:
    """Refuse to make a constant that the model does not contain if it is too large for a file."""
    if math.prod(shape) > _MOST_ELEMENTS:
        raise CannotWriteError(f"it needs a constant of the shape {list(shape)}, which is too large")


def write_unary(kind: str, **options: Any) -> Callable[[Lowering, ir.Node], None]:
    """Return a function that writes an operator on one tensor as `kind`."""

    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator on one tensor."""
        source = work.activation(node.inputs[0])
        if source.features is not None:
            source = work.arranged(source, model_order(2))
        work.write(node, kind, (source.tensor,), source.order, dict(options), scales=_FIXED.get(kind))

    return write


_FIXED = {"LOGISTIC": Scales.of(1 / 256, -128), "TANH": Scales.of(1 / 128, 0)}
"""Output scales that the kernels of .tflite files always use, whatever scales a file contains."""


def write_leaky(work: Lowering, node: ir.Node) -> None:
    """Write LEAKY_RELU."""
    write_unary("LEAKY_RELU", alpha=node.attributes.get_float("alpha", 0.01))(work, node)


def write_gelu(work: Lowering, node: ir.Node) -> None:
    """Write GELU."""
    approximate = node.attributes.get_string("approximate", "none") == "tanh"
    write_unary("GELU", approximate=approximate)(work, node)


def write_prelu(work: Lowering, node: ir.Node) -> None:
    """Write PRELU. Its slopes have the same axis order as the tensor."""
    source = work.activation(node.inputs[0])
    slope = constant_side(work, node.inputs[1], len(source.shape), source.order)
    shape = slope.tensor.shape[1:]
    values, scales = slope.tensor.values, slope.tensor.scales
    assert values is not None
    if slope.shape[0] != 1:
        raise CannotWriteError("it has a slope for each sample")
    wide = (
        np.broadcast_to(values.reshape(shape), (*[1] * (len(shape) - 1), source.tensor.shape[-1]))
        if (values.size == 1)
        else values.reshape(shape)
    )
    alpha = work.fixed(name_of(node.inputs[1]), np.ascontiguousarray(wide), scales)
    work.write(node, "PRELU", (source.tensor, alpha), source.order)


def write_clamp(work: Lowering, node: ir.Node) -> None:
    """Write a Relu or Clip as one float operator if the file has a suitable one, or else as a MAXIMUM and a MINIMUM."""
    source, bounds = work.activation(node.inputs[0]), clamp_bounds(node)
    if bounds is None:
        _write_computed_clamp(work, node)
        return
    if source.features is not None:
        source = work.arranged(source, model_order(2))
    kind = {(0.0, np.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}.get(bounds)
    if not work.integer and kind is not None:
        work.write(node, kind, (source.tensor,), source.order)
        return
    current = source
    for bound, step in zip(bounds, ("MAXIMUM", "MINIMUM"), strict=True):
        if np.isinf(bound):
            continue
        tensor = current.tensor
        filler = np.array([filler_of(tensor, bound)[0]], np.dtype(tensor.type)).reshape((1,) * len(tensor.shape))
        limit = work.fixed(f"{node.name}/bound", filler, tensor.scales)
        clamped = work.like(tensor, f"{node.outputs[0].name}/{step.lower()}", tensor.shape)
        work.emit(step, (tensor, limit), clamped)
        current = Stored(clamped, current.order, current.shape)
    work.hold(node.outputs[0], current)


def _write_computed_clamp(work: Lowering, node: ir.Node) -> None:
    """Write a Clip of integers that are not quantized, or with computed bounds, as a MAXIMUM and a MINIMUM."""
    if work.integer:
        raise CannotWriteError("its bounds are computed")
    source = work.activation(node.inputs[0])
    source = source if source.features is None else work.arranged(source, model_order(2))
    current = source.tensor
    for place, kind in ((1, "MAXIMUM"), (2, "MINIMUM")):
        value = node_input(node, place)
        if value is not None:
            numbers = work.floats(value) if work.is_constant(value) else None
            ones = (1,) * len(current.shape)
            if numbers is not None:
                bound = work.fixed(name_of(value), numbers.reshape(ones))
            else:
                bound = work.as_shape(work.activation(value), ones, f"{name_of(value)}/raised").tensor
            clamped = work.like(current, f"{node.outputs[0].name}/{kind.lower()}", current.shape)
            current = work.emit(kind, (current, bound), clamped)
    work.hold(node.outputs[0], Stored(current, source.order, source.shape))


def write_hard_sigmoid(work: Lowering, node: ir.Node) -> None:
    """Write clamp(alpha x + beta, 0, 1).

    On integers, this is an ADD followed by a MUL. The ADD computes x + beta / alpha at the result's scale divided by
    alpha, and the range of the integers clamps the sum. The MUL by alpha changes only the scale, not the integers.
    """
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    source, scales = work.activation(node.inputs[0]), work.parameters(node)
    ones, name = (1,) * len(source.shape), name_of(node.outputs[0])
    if scales is None:
        shape, order, tensor = source.tensor.shape, source.order, source.tensor
        for kind, number in (("MUL", alpha), ("ADD", beta), ("MAXIMUM", 0.0), ("MINIMUM", 1.0)):
            constant = work.fixed(f"{name}/{kind.lower()}", np.full(ones, number, np.float32))
            if kind == "MINIMUM":
                work.write(node, kind, (tensor, constant), order)
            else:
                output = work.partial(f"{name}/{kind.lower()}ed", shape, None)
                tensor = work.emit(kind, (tensor, constant), output, ACTIVATED.get(kind))
        return
    if alpha <= 0 or beta < 0:
        raise CannotWriteError(f"its alpha, {alpha:g}, is not positive, or its beta, {beta:g}, is negative")
    low, high = ((end - int(scales.zero[0])) * float(scales.scale[0]) for end in (-128, 127))
    if low < -float(scales.scale[0]) / 2 or high > 1 + float(scales.scale[0]) / 2:
        raise CannotWriteError("the range of its result is wider than 0 to 1")
    wide = Scales.of(float(scales.scale[0]) / alpha, int(scales.zero[0]))
    shift = work.fixed(f"{name}/shift", np.full(ones, 127, np.int8), Scales.of(beta / alpha / 127, 0))
    factor = work.fixed(f"{name}/factor", np.full(ones, 127, np.int8), Scales.of(alpha / 127, 0))
    moved = work.emit(
        "ADD", (source.tensor, shift), work.partial(f"{name}/shifted", source.tensor.shape, wide), ACTIVATED["ADD"]
    )
    work.write(node, "MUL", (moved, factor), source.order, ACTIVATED["MUL"])


def write_softmax(work: Lowering, node: ir.Node) -> None:
    """Write SOFTMAX or LOG_SOFTMAX. Both work on the last axis of the file's tensor."""
    source = work.activation(node.inputs[0])
    rank = len(source.shape)
    axis = node.attributes.get_int("axis", -1) % rank
    order = source.order
    if order[-1] != axis:
        order = (*[a for a in range(rank) if a != axis], axis)
    source = work.arranged(source, order)
    kind = "LOG_SOFTMAX" if node.op_type == "LogSoftmax" else "SOFTMAX"
    fixed = Scales.of(16 / 256, 127) if kind == "LOG_SOFTMAX" else Scales.of(1 / 256, -128)
    work.write(node, kind, (source.tensor,), order, {"beta": 1.0} if kind == "SOFTMAX" else {}, scales=fixed)


def write_batch_norm(work: Lowering, node: ir.Node) -> None:
    """Write a BatchNormalization in float, as a MUL and an ADD."""
    source = work.activation(node.inputs[0])
    if work.integer:
        raise CannotWriteError("it has no integer form")
    gamma, beta, mean, variance = (work.floats(value).astype(np.float64) for value in node.inputs[1:5])
    factor = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    shape = [1] * len(source.shape)
    if len(shape) > 1:
        shape[source.order.index(1)] = -1
    name = name_of(node.outputs[0])
    scaled = work.partial(f"{name}/scaled", source.tensor.shape, None)
    for_each = [
        work.fixed(f"{name}/{i}", v.astype(np.float32).reshape(shape))
        for i, v in enumerate((factor, beta - mean * factor))
    ]
    work.emit("MUL", (source.tensor, for_each[0]), scaled, ACTIVATED["MUL"])
    work.write(node, "ADD", (scaled, for_each[1]), source.order, ACTIVATED["ADD"])


def write_cast(work: Lowering, node: ir.Node) -> None:
    """Write CAST. Integers of every width are already int32 in the file."""
    if work.integer:
        raise CannotWriteError("it has no int8 kernel")
    source, target_type = work.activation(node.inputs[0]), work.type_of(node.outputs[0])
    if source.tensor.type == target_type:
        work.hold(node.outputs[0], source)
        return
    if source.features is not None:
        source = work.arranged(source, model_order(2))
    options = {"inDataType": source.tensor.type.upper(), "outDataType": target_type.upper()}
    work.write(node, "CAST", (source.tensor,), source.order, options)


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
    if not axes:
        work.hold(node.outputs[0], source)
        return
    kind = _REDUCERS.get(node.op_type, "MEAN")
    like = source.tensor if kind in ("REDUCE_MAX", "REDUCE_MIN") else None
    inputs = (source.tensor, axes_of(work, source, axes))
    work.write(node, kind, inputs, order_after(source.order, axes, keeps=keeps), {"keepDims": keeps}, like=like)


def reduction(work: Lowering, node: ir.Node) -> tuple[Stored, list[int], bool]:
    """Return the input of a reduction, the axes that it reduces, and whether they stay as axes of size 1."""
    source = work.activation(node.inputs[0])
    rank = len(source.shape)
    if source.features is not None:
        source = work.arranged(source, model_order(rank))
    if node.op_type.startswith("Global"):
        return source, list(range(2, rank)), True
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
