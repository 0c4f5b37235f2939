"""Decide when a Relu or Clip can be removed because the quantization of its result has the same effect.

QuantizeLinear saturates at both ends of its integer range. A preceding clamp to low..high changes nothing if `low` and
`high` are quantized to these ends:

    quantize(low) = smallest integer    and    quantize(high) = largest integer

Otherwise, some numbers would become different integers without the clamp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgeq.model.graph import (
    clamp_bounds,
    clamps,
    is_op,
)
from edgeq.model.quant_params import QuantParams


def implies_clamp(params: QuantParams, low: float, high: float) -> bool:
    """Return whether quantization with `params` saturates all values that a clamp to `low`..`high` would change.

    Args:
        params: parameters of the clamp's result, with one scale.
        low, high: bounds of the clamp; infinite if there is no bound.
    """
    scale, zero = float(params.scale.reshape(())), int(params.zero_point.reshape(()))
    below = math.isinf(low) or float(np.rint(low / scale)) + zero <= params.low
    above = math.isinf(high) or float(np.rint(high / scale)) + zero >= params.high
    return below and above


def can_disappear(clamp: ir.Node, params: QuantParams | None) -> bool:
    """Return whether a clamp can be removed if its result is quantized with `params`. The clamp must be the only reader
    of its input.

    The caller must make sure that every node that reads the result reads it after this quantization.
    """
    bounds = clamp_bounds(clamp)
    return params is not None and bounds is not None and implies_clamp(params, *bounds)


def find_lasting_clamps(graph: ir.Graph, params_of: Callable[[ir.Value], QuantParams | None]) -> frozenset[str]:
    """Return the names of the Relu and Clip nodes that no quantizer may remove.

    These are nodes whose input has other readers, nodes whose result is read directly in a body of control flow, and
    nodes that still have an effect when their result is quantized.

    Args:
        params_of: function that returns the quantization parameters of a tensor; None for a tensor that stays in float.
    """
    alone = set(clamps(graph))
    names = set()
    for node in graph:
        if is_op(node, "Relu", "Clip"):
            result = node.outputs[0]
            inside = any(use.node.graph is not graph for use in result.uses())
            if node not in alone or inside or not can_disappear(node, params_of(result)):
                names.add(str(node.name))
    return frozenset(names)
