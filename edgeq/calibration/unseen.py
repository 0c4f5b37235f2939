"""Find the tensors that the samples leave empty.

An input such as a cache, a mask or a second camera may be zero in all samples. Its range would be 0..0, and 8 bits
would round all values in use to whole numbers. An empty range is not evidence, so the tensor stays in float. So do the
tensors that are computed only from such tensors, and zeros that are computed from them. The range of a sum of such a
tensor and another one is too narrow, so the sum stays in float up to the next layer. Zeros that an operator makes of
other values, such as those of a Relu whose input is negative, do not count.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgeq.calibration.joins import BOUNDED
from edgeq.calibration.spreads import ModelSpreads, is_empty
from edgeq.model.graph import (
    clamp_bounds,
    is_op,
    name_of,
    node_input,
    operator_of,
    reads,
)
from edgeq.model.parameters import float_constant

UNSEEN = "depends on values of input {!r} that the calibration samples do not have: its range in use is not known"
_SUMS = ("Add", "Mul", "Sub", "Sum")
_NORMALIZED = (*BOUNDED, "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization")


def find_unseen(measured: ModelSpreads) -> Mapping[str, str]:
    """Return tensor → input, for tensors whose range in use is not known, because the samples leave that input empty.

    A model input without statistics, such as a mask of integers, counts as empty if zeros are computed from it.
    """
    graph = measured.model.graph
    sources: dict[str, dict[str, None]] = {name_of(value): {name_of(value): None} for value in graph.inputs}
    unseen = {name_of(value): name_of(value) for value in graph.inputs if is_empty(measured.spread(value))}
    partly: dict[str, str] = {}
    for node in graph:
        operands = [value for value in reads(node) if not measured.is_constant(value)]
        # The shape of an empty tensor is known.
        behind = [] if is_op(node, "Shape", "Size") else [value for value in operands if name_of(value) in unseen]
        inputs = dict.fromkeys(name for value in operands for name in sources.get(name_of(value), ()))
        for output in node.outputs:
            name = name_of(output)
            sources[name] = inputs
            if (behind and len(behind) == len(operands)) or (is_empty(measured.spread(output)) and behind):
                unseen[name] = unseen[name_of(behind[0])]
            elif is_empty(measured.spread(output)) and inputs and not _makes_zeros(node, measured):
                unseen[name] = _likely_cause(inputs, measured)
            elif behind and is_op(node, *_SUMS):
                partly[name] = unseen[name_of(behind[0])]
            elif not (operator_of(node).mac_rule or is_op(node, *_NORMALIZED)):
                causes = [unseen.get(name_of(value)) or partly.get(name_of(value)) for value in operands]
                if causes and causes[0] and all(causes):
                    partly[name] = causes[0]
    causes_by_name = {**unseen, **partly}
    return {name: source for name, source in causes_by_name.items() if name and measured.spread_of(name) is not None}


def _makes_zeros(node: ir.Node, measured: ModelSpreads) -> bool:
    """Return whether a node makes zeros by itself: it clamps other values, multiplies them by zero, or reads zeros that
    another node made.
    """
    if any(is_empty(measured.spread(value)) for value in node.inputs):
        return True
    constants = [values for value in node.inputs if (values := float_constant(value)) is not None]
    # Only constants that are all zero turn other values into zeros.
    if is_op(node, "Mul", "Conv", "ConvTranspose", "Gemm", "MatMul"):
        return any(not values.any() for values in constants[:1])
    spread = measured.spread(node_input(node, 0))
    return clamp_bounds(node) is not None and spread is not None and bool(spread.magnitudes.size)


def _likely_cause(names: Mapping[str, None], measured: ModelSpreads) -> str:
    """Return the input that is the likely cause of zeros: an empty one, else one without statistics, such as a mask of
    integers, else the first one.
    """
    spreads = {name: measured.spread_of(name) for name in names}
    empty = (name for name, spread in spreads.items() if is_empty(spread))
    unknown = (name for name, spread in spreads.items() if spread is None)
    return next(empty, None) or next(unknown, None) or next(iter(names))
