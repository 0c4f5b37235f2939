"""Decide when a Relu or Clip may disappear into the quantization of its result.

QuantizeLinear saturates at both ends of its integers. A clamp to low..high changes nothing in front of it where those
ends are the integers of `low` and `high`:

    quantize(low) = smallest integer    and    quantize(high) = largest integer

Then, and only then, does every number become the same integer with and without the clamp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from edgeq.graph.quant_params import QuantParams
from edgeq.graph.query import clamp_bounds, is_op, only_reader


def implies_clamp(params: QuantParams, low: float, high: float) -> bool:
    """Return whether quantization with `params` saturates wherever a clamp to `low`..`high` would.

    Args:
        params: of the clamp's result, with one scale.
        low, high: bounds of the clamp, infinite where it has none.
    """
    scale, zero = float(params.scale.reshape(())), int(params.zero_point.reshape(()))
    below = math.isinf(low) or float(np.rint(low / scale)) + zero <= params.low
    above = math.isinf(high) or float(np.rint(high / scale)) + zero >= params.high
    return below and above


def clamps(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the Relu and Clip nodes of a graph that alone read the tensor in front of them, last one first."""
    for node in reversed(graph):
        if is_op(node, "Relu", "Clip") and node.inputs[0] is not None and only_reader(node.inputs[0]) is node:
            yield node


def may_disappear(clamp: ir.Node, params: QuantParams | None) -> bool:
    """Return whether a clamp that alone reads its input may go where its result is quantized with `params`.

    Every reader of the result must read it behind that quantization: the caller sees to it.
    """
    bounds = clamp_bounds(clamp)
    return params is not None and bounds is not None and implies_clamp(params, *bounds)


def lasting_clamps(graph: ir.Graph, params_of: Callable[[ir.Value], QuantParams | None]) -> frozenset[str]:
    """Return the names of the Relu and Clip nodes that no quantizer may drop.

    They are those that do not alone read their input, whose result a body of control flow reads as it is, or that the
    quantization of their result does not imply.

    Args:
        params_of: the parameters that a tensor is quantized with; None where it stays in float.
    """
    alone = set(clamps(graph))
    kept = set()
    for node in graph:
        if is_op(node, "Relu", "Clip"):
            result = node.outputs[0]
            inside = any(use.node.graph is not graph for use in result.uses())
            if node not in alone or inside or not may_disappear(node, params_of(result)):
                kept.add(str(node.name))
    return frozenset(kept)
