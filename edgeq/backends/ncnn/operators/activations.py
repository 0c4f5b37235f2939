"""Find the activation behind a layer, which ncnn computes as a part of the layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.lower import NcnnLowering
from edgeq.backends.ncnn.network import Setting
from edgeq.model.graph import clamp_bounds, is_op

# The largest float32: a clip without a bound.
_UNBOUNDED = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class FusedActivation:
    """Describe an activation by ncnn's number, 0 for none, and its numbers."""

    number: int = 0
    numbers: tuple[float, ...] = ()

    def settings(self, number: int, numbers: int) -> dict[int, Setting]:
        """Return the parameters of a layer, at the keys `number` and `numbers`."""
        if not self.number:
            return {}
        return {number: self.number, **({numbers: self.numbers} if self.numbers else {})}


NO_ACTIVATION = FusedActivation()


def take_activation(work: NcnnLowering, value: ir.Value) -> tuple[FusedActivation, ir.Value]:
    """Return the activation that is the only reader of a layer's output, and the activation's output. If there is none,
    return `NO_ACTIVATION` and `value`.
    """
    reader = work.sole_reader(value)
    activation = _activation(reader) if reader is not None else None
    if reader is None or activation is None:
        return NO_ACTIVATION, value
    return activation, work.merge(reader)


def clip_numbers(node: ir.Node) -> tuple[float, float] | None:
    """Return finite bounds of a Relu or Clip, or None if a bound is computed."""
    bounds = clamp_bounds(node)
    if bounds is None:
        return None
    return max(bounds[0], -_UNBOUNDED), min(bounds[1], _UNBOUNDED)


def hard_numbers(node: ir.Node) -> tuple[float, float]:
    """Return the slope and the offset of a HardSigmoid or HardSwish."""
    if is_op(node, "HardSwish"):
        return 1 / 6, 0.5
    return node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)


def _activation(node: ir.Node) -> FusedActivation | None:
    if is_op(node, "Relu"):
        return FusedActivation(1)
    if is_op(node, "LeakyRelu"):
        return FusedActivation(2, (node.attributes.get_float("alpha", 0.01),))
    if is_op(node, "Clip"):
        numbers = clip_numbers(node)
        return None if numbers is None else FusedActivation(3, numbers)
    if is_op(node, "Sigmoid"):
        return FusedActivation(4)
    if is_op(node, "HardSwish"):
        return FusedActivation(6, hard_numbers(node))
    return None
