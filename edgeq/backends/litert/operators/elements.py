"""Write operators that work on the elements of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.dialect import fixed_output
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import Scales
from edgeq.backends.litert.operators.arithmetic import ACTIVATED, constant_side
from edgeq.backends.litert.operators.padding import filler_of
from edgeq.model.graph import clamp_bounds, name_of, node_input


def write_unary(kind: str, **options: Any) -> Callable[[Lowering, ir.Node], None]:
    """Return a function that writes an operator on one tensor as `kind`."""

    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator on one tensor."""
        source = work.in_order(work.activation(node.inputs[0]))
        work.write(node, kind, (source.tensor,), source.order, dict(options), scales=fixed_output(kind, work.type))

    return write


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
    # PRELU leaves the batch out of its slopes.
    if slope.shape[0] != 1:
        raise CannotWriteError("it has a slope for each sample")
    # A single slope serves every channel. PRELU's kernels still expect one for each.
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
    source = work.in_order(source)
    # The three activations that the file has as operators.
    kind = {(0.0, np.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}.get(bounds)
    # In 8 bits, each clamp is in the scale of its tensor. In 16 bits, the scales before and after it are the same.
    if work.type != "int8" and kind is not None:
        work.write(node, kind, (source.tensor,), source.order, like=source.tensor if work.integer else None)
        return
    current = source
    for bound, step in zip(bounds, ("MAXIMUM", "MINIMUM"), strict=True):
        if np.isinf(bound):
            continue
        tensor = current.tensor
        # On integers, the bound is the integer nearest to it in the tensor's own scale, so the result keeps that scale.
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
    source = work.in_order(work.activation(node.inputs[0]))
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
    if scales.type != "int8":
        raise CannotWriteError("its clamp is the end of the integers' range, which 16-bit integers reach beyond")
    # Both numbers become scales of constants, and a scale cannot be negative.
    if alpha <= 0 or beta < 0:
        raise CannotWriteError(f"its alpha, {alpha:g}, is not positive, or its beta, {beta:g}, is negative")
    # The clamp is the end of the integers' range, so that range must not reach beyond 0 and 1 by more than half a step.
    low, high = ((end - int(scales.zero[0])) * float(scales.scale[0]) for end in (-128, 127))
    if low < -float(scales.scale[0]) / 2 or high > 1 + float(scales.scale[0]) / 2:
        raise CannotWriteError("the range of its result is wider than 0 to 1")
    wide = Scales.of(float(scales.scale[0]) / alpha, int(scales.zero[0]))
    # 127 is the largest integer, so the constant has the finest scale that can hold it.
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
    options = {"beta": 1.0} if kind == "SOFTMAX" else {}
    work.write(node, kind, (source.tensor,), order, options, scales=fixed_output(kind, work.type))


def write_cast(work: Lowering, node: ir.Node) -> None:
    """Write CAST. Integers of every width are already int32 in the file."""
    if work.integer:
        raise CannotWriteError("it has no int8 kernel")
    source, target_type = work.activation(node.inputs[0]), work.type_of(node.outputs[0])
    # int64 to int32, for example, which are one type in the file.
    if source.tensor.type == target_type:
        work.hold(node.outputs[0], source)
        return
    source = work.in_order(source)
    options = {"inDataType": source.tensor.type.upper(), "outDataType": target_type.upper()}
    work.write(node, "CAST", (source.tensor,), source.order, options)
