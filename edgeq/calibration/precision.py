"""Find the tensors whose small values, angles or indices 8 bits would spoil.

Rounding to 8 bits adds an error of the same size to all values of a tensor, large or small. A sum tolerates this.
Divisors, logarithms and roots do not if some values are close to zero compared with the range. Sin and Cos do not if
the range covers many periods. A float that becomes an index, such as that of a Gather, must be exact.

For each argument of these operators, edgeq computes the largest error that the argument may have, as a standard
deviation. It follows this error upstream through operators whose effect on an error is known (products, sums, means,
roots, layers). Every tensor on this path stays in float if its rounding to 8 bits would cause a larger error. edgeq
stops at all other operators. Once its path has passed a layer, it also stops at activation functions, because values
inside a network are quantized anyway. The mean square that a norm divides by always stays in float.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgeq.calibration.spreads import LEVELS, ModelSpreads, Spread
from edgeq.model.graph import (
    MAIN_DOMAINS,
    consumers,
    is_op,
    moves_data,
    name_of,
    node_input,
)
from edgeq.model.parameters import float_constant, output_channels

ANGLE = "is the angle of a Sin or Cos, or leads to it: 8 bits are too coarse for their period"
INDEX = "becomes an index, or leads to one: 8 bits would round it to another place"
DIVISOR = "is a divisor, or leads to one: 8 bits would round its small values to zero"
LOGARITHM = "is the argument of a logarithm, or leads to it: 8 bits would round its small values to zero"
ROOT = "is the argument of a root, or leads to it: 8 bits would round its small values to zero"
# Largest relative error of a small value. It corresponds to an SQNR of 34 dB, somewhat less than that of an 8-bit
# activation.
_RELATIVE = 0.02
# Largest error of an angle. It changes a sine by at most a hundredth.
_RADIANS = 0.01
# Largest error of a float that becomes an index, in places. Larger errors would choose another place too often.
_OF_INDEX = 0.01
# Roots with at least this signal-to-noise ratio (30 dB) need no more precision.
_MIN_ROOT_SNR = 1e3
_CLAMPS = frozenset({"Clip", "LeakyRelu", "Max", "MaxPool", "Min", "ReduceMax", "ReduceMin", "Relu"})
_SIGNS = frozenset({"Abs", "Cast", "Ceil", "Floor", "Neg", "Round"})
_CHOICES = frozenset({"Add", "Concat", "Sub", "Sum", "Where"})
_MEANS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})


@dataclass(frozen=True)
class _Need:
    """Describe the precision that a tensor needs.

    Attributes:
        value: the tensor.
        error: largest permitted error, as a standard deviation.
        reason: why the tensor needs this precision.
        layers: number of layers between the tensor and the argument that needs the precision.
    """

    value: ir.Value
    error: float
    reason: str
    layers: int = 0


def find_precise(measured: ModelSpreads) -> Mapping[str, str]:
    """Return name → reason, for tensors that need more precision than 8 bits offer."""
    reasons: dict[str, str] = {}
    for node in measured.model.graph:
        for need in _arguments(node, measured):
            path, norm = _follow_upstream(need, measured)
            names = [name for name, coarse in path.items() if coarse or norm]
            if names and need.reason == DIVISOR and _inverts(node, measured):
                names.append(name_of(node.outputs[0]))
            for name in names:
                reasons.setdefault(name, need.reason)
    return reasons


def _inverts(node: ir.Node, measured: ModelSpreads) -> bool:
    """Return whether a node computes a reciprocal. A product that reads this reciprocal is a division by the node's
    input.
    """
    return not is_op(node, "Div") or measured.is_constant(node.inputs[0])


def _arguments(node: ir.Node, measured: ModelSpreads) -> Iterator[_Need]:
    """Yield the precision that each argument of a node needs, if the node's function is sensitive to small values."""
    if node.domain not in MAIN_DOMAINS:
        return
    argument, divisor = node_input(node, 0), node_input(node, 1)
    power = _exponent(node)
    if is_op(node, "Sin", "Cos", "Tan") and argument is not None:
        yield _Need(argument, _RADIANS, ANGLE)
    elif node in measured.index_casts and argument is not None:
        yield _Need(argument, _OF_INDEX, INDEX)
    elif is_op(node, "Log"):
        yield from _near_zero(argument, LOGARITHM, measured)
    elif is_op(node, "Div"):
        yield from _near_zero(divisor, DIVISOR, measured)
    elif is_op(node, "Reciprocal") or (power is not None and power < 0):
        yield from _near_zero(argument, DIVISOR, measured)
    elif argument is not None and power is not None and 0 < power < 1 and not _divides(node.outputs[0], measured):
        spread = measured.spread(argument)
        if spread is not None and root_snr(spread, power) < _MIN_ROOT_SNR:
            # With this error, the root of a small value is wrong by a fiftieth of the mean of all roots.
            mean = float(np.sum(spread.counts * spread.magnitudes**power)) / max(1, spread.count)
            yield _Need(argument, _RELATIVE * mean / power * spread.small ** (1 - power), ROOT)


def _near_zero(value: ir.Value | None, reason: str, measured: ModelSpreads) -> Iterator[_Need]:
    spread = measured.spread(value)
    if value is not None and spread is not None and spread.magnitudes.size:
        # Values below half a step are rounded to zero, and dividing by zero gives infinity.
        yield _Need(value, min(_RELATIVE * spread.small, spread.smallest / math.sqrt(12)), reason)


def _divides(value: ir.Value, measured: ModelSpreads) -> bool:
    """Return whether a tensor is used only as a divisor, possibly after a constant was added."""
    uses = consumers(value)
    return bool(uses) and all(
        is_op(node, "Reciprocal")
        or (is_op(node, "Div") and place == 1)
        or (
            is_op(node, "Add", "Clip", "Max", "Expand")
            and all(operand is value or measured.is_constant(operand) for operand in node.inputs if operand is not None)
            and _divides(node.outputs[0], measured)
        )
        for node, place in uses
    )


def root_snr(spread: Spread, power: float = 0.5) -> float:
    """Return the signal-to-noise ratio, as a power ratio, of a tensor's roots if the tensor is rounded to 8 bits."""
    if not spread.width:
        return math.inf
    step = spread.width / LEVELS
    roots, rounded = spread.magnitudes**power, (np.round(spread.magnitudes / step) * step) ** power
    error = float(np.sum(spread.counts * (rounded - roots) ** 2))
    return float(np.sum(spread.counts * roots**2)) / error if error else math.inf


def _follow_upstream(need: _Need, measured: ModelSpreads) -> tuple[dict[str, bool], bool]:
    """Follow a permitted error upstream.

    Returns:
        For each tensor on the way, whether 8 bits are too coarse for it; and whether the search reached the mean square
        of a norm.
    """
    path: dict[str, bool] = {}
    norm, waiting = False, [need]
    while waiting:
        at = waiting.pop()
        name = name_of(at.value)
        # A tensor that is already too coarse cannot become coarser, so its path is not followed again.
        if measured.is_constant(at.value) or path.get(name):
            continue
        spread = measured.spread(at.value)
        coarse = spread is not None and (spread.noise > at.error or (at == need and at.reason in (ANGLE, INDEX)))
        is_repeated = name in path
        path[name] = coarse
        node = at.value.producer()
        if node is None or node.domain not in MAIN_DOMAINS or (is_repeated and not coarse):
            continue
        # A layer averages the errors of its inputs, so only a coarse output is followed through it.
        if _is_layer(node) and not coarse:
            continue
        if at.reason == DIVISOR and _is_square(node):
            norm = True
            continue
        # Values inside a network are quantized anyway, so the path ends at the first activation function.
        if at.layers and node.op_type in _CLAMPS:
            continue
        waiting.extend(
            replace(at, value=value, error=error, layers=at.layers + _is_layer(node))
            for value, error in _upstream_errors(node, at.error, measured)
        )
    return path, norm


def _upstream_errors(node: ir.Node, error: float, measured: ModelSpreads) -> Iterator[tuple[ir.Value, float]]:
    """Yield the inputs through which errors reach a node's output, each with the error that it may have if the output
    may have `error`.
    """
    inputs = [value for value in node.inputs if value is not None]
    source, output = inputs[0] if inputs else None, node.outputs[0]
    if source is None:
        return
    power = _exponent(node)
    if _is_layer(node):
        yield from ((value, error / gain) for value, gain in _gains(node, measured))
    elif moves_data(node) or node.op_type in _CLAMPS | _SIGNS:
        yield from ((value, error) for value in (inputs if node.op_type in ("Max", "Min") else inputs[:1]))
    elif node.op_type in _CHOICES:
        yield from ((value, error) for value in inputs)
    elif _is_square(node):
        divided = _share(source, output, measured) if node.op_type == "ReduceSumSquare" else 1.0
        yield source, error if node.op_type == "ReduceL2" else error * math.sqrt(divided) / (2 * measured.rms(source))
    elif is_op(node, "Mul"):
        yield inputs[0], error / measured.rms(inputs[1])
        yield inputs[1], error / measured.rms(inputs[0])
    elif is_op(node, "Div"):
        yield source, error * measured.rms(inputs[1])
    elif power is not None and 0 < power < 1:
        output_spread = measured.spread(output)
        if output_spread is not None and math.isfinite(output_spread.small):
            yield source, error / power * output_spread.small ** (1 / power - 1)
    elif node.op_type in _MEANS:
        yield source, error / math.sqrt(_share(source, output, measured))
    elif is_op(node, "ReduceSum"):
        yield source, error * math.sqrt(_share(source, output, measured))


def _share(value: ir.Value, output: ir.Value, measured: ModelSpreads) -> float:
    """Return the number of elements of a reduced output divided by that of its input. Return 1 if a number is not
    known.
    """
    input_spread, output_spread = measured.spread(value), measured.spread(output)
    return (
        output_spread.count / input_spread.count
        if input_spread is not None and output_spread is not None and input_spread.count and output_spread.count
        else 1.0
    )


def _is_layer(node: ir.Node) -> bool:
    return is_op(node, "Conv", "ConvTranspose", "Gemm", "MatMul")


def _gains(node: ir.Node, measured: ModelSpreads) -> Iterator[tuple[ir.Value, float]]:
    """Yield the computed operands of a layer, each with the factor by which the layer amplifies a random error."""
    for place in (0, 1):
        value, factor = node.inputs[place], node.inputs[1 - place]
        if value is None or measured.is_constant(value):
            continue
        weights = float_constant(factor)
        # A product of two activations adds up as many errors as the shared axis has elements.
        if weights is None:
            depth = value.shape[-1] if value.shape is not None and len(value.shape) else 1
            yield value, measured.rms(factor) * math.sqrt(depth if isinstance(depth, int) else 1)
        elif weights.ndim > 1:
            channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
            yield value, math.sqrt(float(np.sum(weights**2)) / (channels if place == 0 else weights.shape[-2])) or 1.0


def _is_square(node: ir.Node) -> bool:
    if is_op(node, "Mul"):
        return node.inputs[0] is node.inputs[1]
    return is_op(node, "ReduceSumSquare", "ReduceL2") or _exponent(node) == 2


def _exponent(node: ir.Node) -> float | None:
    """Return the constant exponent of a power or root; None for other nodes."""
    if is_op(node, "Sqrt"):
        return 0.5
    exponent = float_constant(node_input(node, 1)) if is_op(node, "Pow") else None
    return float(exponent.reshape(-1)[0]) if exponent is not None and exponent.size == 1 else None
