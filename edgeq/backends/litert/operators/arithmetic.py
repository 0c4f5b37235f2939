"""Write operators that combine the elements of several tensors, which are broadcast to one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order, model_order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.model.graph import name_of


def write_binary(kind: str) -> Callable[[Lowering, ir.Node], None]:
    """Return a function that writes an operator on broadcast tensors as `kind`, which joins two tensors. For further
    tensors, more operators follow.
    """

    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator on broadcast tensors."""
        sides, order = broadcast(work, node)
        scales = work.parameters(node)
        # These kernels compare integers as they are, so both sides need the scale of the result.
        if scales is not None and kind in ("MAXIMUM", "MINIMUM"):
            sides = [work.requantized(side, scales) for side in sides]
        # Only the final result was calibrated.
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


# Operators whose options must name an activation, even if there is none.
ACTIVATED: dict[str, dict[str, Any]] = {
    kind: {"fusedActivationFunction": "NONE"} for kind in ("ADD", "SUB", "MUL", "DIV")
}


def broadcast(work: Lowering, node: ir.Node) -> tuple[list[Stored], Order]:
    """Return all inputs of a node with their axes in one common order, and that order."""
    rank = len(work.sizes(node.outputs[0]))
    # A constant costs nothing in any order of axes, so only activations choose it.
    inputs: list[Stored | None] = [None if work.is_constant(v) else work.activation(v) for v in node.inputs]
    raised = [_raised(work, value, rank) for value in inputs if value is not None]
    # An order other than the model's mostly comes from an operator on images, and goes to one.
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
    # The kernels of these operators read one scale for each input.
    if scales is not None and scales.scale.size > 1:
        raise CannotWriteError("it reads a constant with a scale for each channel")
    if scales is not None and scales.type != work.type:
        raise CannotWriteError("it reads a constant with integers of another type")
    raised = values.reshape((1,) * (rank - values.ndim) + values.shape)
    stored = raised.transpose(order) if values.size > 1 else values.reshape((1,) * rank)
    return Stored(work.fixed(name_of(value), stored, scales), order, raised.shape)


# 16 million: 64 MiB of float32. The schema's offsets end at 2 GiB.
_MOST_ELEMENTS = 1 << 24


def refuse_large(shape: Sequence[int]) -> None:
    """Refuse to make a constant that the model does not contain if it is too large for a file."""
    if math.prod(shape) > _MOST_ELEMENTS:
        raise CannotWriteError(f"it needs a constant of the shape {list(shape)}, which is too large")


def write_batch_norm(work: Lowering, node: ir.Node) -> None:
    """Write a BatchNormalization in float, as a MUL and an ADD."""
    source = work.activation(node.inputs[0])
    if work.integer:
        raise CannotWriteError("it has no integer form")
    # float64, because the four numbers are combined only once, here, and not in every run.
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
