"""Tensors whose small values count: angles, divisors, and what a logarithm or a root is taken of.

Rounding to 8 bits makes an error of one size for all values of a tensor. A sum bears that. A divisor, a logarithm and a
root do not where values are near zero next to the range, and Sin and Cos do not where the range is many periods long.

From each such argument the error that it may have, as a standard deviation, is followed upstream through the operators
that pass an error on in a known size (products, sums, means, roots, layers). A tensor that 8 bits would give a larger
error is kept. The way ends at other operators; behind a layer, at activation functions too, because what a network
computes with is quantized. The mean square that a norm divides by is kept whatever its values are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.statistics import FINITE, Float64s, Int64s, Nonfinite, Statistics, TensorStatistics
from edgeq.model.graph import MAIN_DOMAINS, GraphIndex, constant, consumers, is_op, moves_data, name_of, node_input
from edgeq.model.tensors import float_constant, output_channels

LEVELS = 255
"""Steps of an 8-bit range."""
FEWEST = 16
"""Levels: a tensor that has fewer has lost more than four of its eight bits."""
_SMALL = 0.01


@dataclass(frozen=True)
class Spread:
    """Magnitudes of the finite values of one tensor, as float64 from its histogram.

    Attributes:
        low, high: the range, with zero in it.
        magnitudes: ascending, without zero; one for each bin and sign.
        counts: of values with them.
        zeros: count of values that are zero.
        nonfinite: the other elements.
    """

    low: float
    high: float
    magnitudes: Float64s
    counts: Int64s
    zeros: int
    nonfinite: Nonfinite = FINITE

    @classmethod
    def of(cls, tensor: TensorStatistics) -> Spread:
        """Return the spread of a tensor that calibration saw."""
        lower, upper = tensor.histogram.edges()
        middle = np.where(tensor.histogram.keys == 0, 0.0, np.abs(lower + upper) / 2)
        counts, order = tensor.histogram.counts, np.argsort(middle, kind="stable")
        middle, counts = middle[order], counts[order]
        zeros = int(np.searchsorted(middle, 0.0, side="right"))
        low, high = (min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)) if tensor.count else (0.0, 0.0)
        return cls(low, high, middle[zeros:], counts[zeros:], int(counts[:zeros].sum()), tensor.nonfinite)

    @property
    def width(self) -> float:
        """The length of the range."""
        return self.high - self.low

    @property
    def noise(self) -> float:
        """The standard deviation of the error of 8 bits: a twelfth of the squared step, as power."""
        return self.width / LEVELS / math.sqrt(12)

    def levels(self, width: float) -> float:
        """Return how many steps of the range an interval of `width` takes."""
        return width / self.width * LEVELS if self.width else math.inf

    @cached_property
    def rms(self) -> float:
        """The root of the mean square."""
        total = int(self.counts.sum()) + self.zeros
        return math.sqrt(float(np.sum(self.counts * self.magnitudes**2)) / total) if total else 0.0

    @property
    def count(self) -> int:
        """Return the number of finite values."""
        return int(self.counts.sum()) + self.zeros

    @property
    def least(self) -> float:
        """The smallest magnitude that is not zero; infinite where there is none."""
        return float(self.magnitudes[0]) if self.magnitudes.size else math.inf

    @cached_property
    def small(self) -> float:
        """The magnitude under which a hundredth of the values that are not zero lie; infinite where there are none."""
        if not self.magnitudes.size:
            return math.inf
        sums = np.cumsum(self.counts)
        return float(self.magnitudes[np.searchsorted(sums, _SMALL * sums[-1])])


class Measured:
    """A prepared model with the spreads of its tensors.

    Attributes:
        model: the model.
        constants: names of tensors that are the same at each run.
    """

    def __init__(self, graph: GraphIndex, statistics: Statistics) -> None:
        self.model = graph.model
        self.constants = graph.computed_constants
        self._tensors = statistics.tensors
        self._spreads: dict[str, Spread | None] = {}

    def spread(self, value: ir.Value | None) -> Spread | None:
        """Return the spread of a tensor; None where calibration did not see it."""
        name = name_of(value)
        if name not in self._spreads:
            found = self._tensors.get(name)
            self._spreads[name] = None if found is None or not found.samples else Spread.of(found)
        return self._spreads[name]

    def rms(self, value: ir.Value | None) -> float:
        """Return the root mean square of a tensor or constant; 1 where it is not known."""
        found = self.spread(value)
        if found is not None:
            return found.rms or 1.0
        values = self.numbers(value)
        return float(np.sqrt(np.mean(values**2))) or 1.0 if values is not None and values.size else 1.0

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a tensor is the same at each run."""
        return name_of(value) in self.constants

    def numbers(self, value: ir.Value | None) -> Float64s | None:
        """Return the values of a constant of floats; None for what is computed, and for other types."""
        values = constant(value)
        return values.astype(np.float64) if values is not None and values.dtype.kind == "f" else None


ANGLE = "is the angle of a Sin or Cos, or leads to it: 8 bits are too coarse for their period"
DIVISOR = "is what a division goes by, or leads to it: 8 bits would round its small values to zero"
LOGARITHM = "is what a logarithm is taken of, or leads to it: 8 bits would round its small values to zero"
ROOT = "is what a root is taken of, or leads to it: 8 bits would round its small values to zero"

_RELATIVE = 0.02
"""The error that a small value may have, as its share: 34 dB, somewhat less than 8 bits leave an activation."""
_RADIANS = 0.01
_LEAST_ROOT_SNR = 1e3
_CLAMPS = frozenset({"Clip", "LeakyRelu", "Max", "MaxPool", "Min", "ReduceMax", "ReduceMin", "Relu"})
_SIGNS = frozenset({"Abs", "Cast", "Neg"})
_CHOICES = frozenset({"Add", "Concat", "Sub", "Sum", "Where"})
_MEANS = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})


@dataclass(frozen=True)
class _Need:
    """Requirements on the precision of a tensor.

    Attributes:
        value: the tensor.
        error: that it may have, a standard deviation.
        reason: why.
        layers: how many layers lie between it and the argument.
    """

    value: ir.Value
    error: float
    reason: str
    layers: int = 0


def find_precise(measured: Measured) -> Mapping[str, str]:
    """Return the tensors that 8 bits are too coarse for, by name, each with the reason."""
    found: dict[str, str] = {}
    for node in measured.model.graph:
        for need in _arguments(node, measured):
            kept, norm = _follow(need, measured)
            names = [name for name, coarse in kept.items() if coarse or norm]
            if names and need.reason == DIVISOR and _inverts(node, measured):
                names.append(name_of(node.outputs[0]))
            for name in names:
                found.setdefault(name, need.reason)
    return found


def _inverts(node: ir.Node, measured: Measured) -> bool:
    """Return whether a division gives a reciprocal, by which products divide then."""
    return not is_op(node, "Div") or measured.is_constant(node.inputs[0])


def _arguments(node: ir.Node, measured: Measured) -> Iterator[_Need]:
    """Yield what the arguments of a node must be good for, where its function makes small values count."""
    if node.domain not in MAIN_DOMAINS:
        return
    first, second = node_input(node, 0), node_input(node, 1)
    power = _exponent(node)
    if is_op(node, "Sin", "Cos", "Tan") and first is not None:
        yield _Need(first, _RADIANS, ANGLE)
    elif is_op(node, "Log"):
        yield from _near_zero(first, LOGARITHM, measured)
    elif is_op(node, "Div"):
        yield from _near_zero(second, DIVISOR, measured)
    elif is_op(node, "Reciprocal") or (power is not None and power < 0):
        yield from _near_zero(first, DIVISOR, measured)
    elif first is not None and power is not None and 0 < power < 1 and not _divides(node.outputs[0], measured):
        spread = measured.spread(first)
        if spread is not None and root_snr(spread, power) < _LEAST_ROOT_SNR:
            # So much that the root of a small value is off by a fiftieth of what most roots are.
            mean = float(np.sum(spread.counts * spread.magnitudes**power)) / max(1, spread.count)
            yield _Need(first, _RELATIVE * mean / power * spread.small ** (1 - power), ROOT)


def _near_zero(value: ir.Value | None, reason: str, measured: Measured) -> Iterator[_Need]:
    spread = measured.spread(value)
    if value is not None and spread is not None and spread.magnitudes.size:
        # Half of a step is rounded to zero, and what a zero divides is infinite.
        yield _Need(value, min(_RELATIVE * spread.small, spread.least / math.sqrt(12)), reason)


def _divides(value: ir.Value, measured: Measured) -> bool:
    """Return whether a tensor is a divisor and nothing else, perhaps after a constant was added."""
    uses = consumers(value)
    return bool(uses) and all(
        is_op(node, "Reciprocal")
        or (is_op(node, "Div") and place == 1)
        or (
            is_op(node, "Add", "Clip", "Max", "Expand")
            and all(read is value or measured.is_constant(read) for read in node.inputs if read is not None)
            and _divides(node.outputs[0], measured)
        )
        for node, place in uses
    )


def root_snr(spread: Spread, power: float = 0.5) -> float:
    """Return the power of the roots of a tensor over that of the error which 8 bits of the tensor make in them."""
    if not spread.width:
        return math.inf
    step = spread.width / LEVELS
    roots, rounded = spread.magnitudes**power, (np.round(spread.magnitudes / step) * step) ** power
    error = float(np.sum(spread.counts * (rounded - roots) ** 2))
    return float(np.sum(spread.counts * roots**2)) / error if error else math.inf


def _follow(need: _Need, measured: Measured) -> tuple[dict[str, bool], bool]:
    """Return the tensors on the way upstream, each with whether 8 bits are too coarse for it, and whether a norm's mean
    square is among them."""
    kept: dict[str, bool] = {}
    norm, waiting = False, [need]
    while waiting:
        at = waiting.pop()
        name = name_of(at.value)
        if measured.is_constant(at.value) or kept.get(name):
            continue
        spread = measured.spread(at.value)
        coarse = spread is not None and (spread.noise > at.error or (at == need and at.reason == ANGLE))
        seen = name in kept
        kept[name] = coarse
        node = at.value.producer()
        if node is None or node.domain not in MAIN_DOMAINS or (seen and not coarse):
            continue
        if _is_layer(node) and not coarse:
            continue
        if at.reason == DIVISOR and _is_square(node):
            norm = True
            continue
        if at.layers and node.op_type in _CLAMPS:
            continue
        waiting.extend(
            replace(at, value=value, error=error, layers=at.layers + _is_layer(node))
            for value, error in _behind(node, at.error, measured)
        )
    return kept, norm


def _behind(node: ir.Node, error: float, measured: Measured) -> Iterator[tuple[ir.Value, float]]:
    """Yield the inputs of a node that pass an error on, each with the error that it may have for the output's."""
    inputs = [value for value in node.inputs if value is not None]
    first, output = inputs[0] if inputs else None, node.outputs[0]
    if first is None:
        return
    power = _exponent(node)
    if _is_layer(node):
        yield from ((value, error / gain) for value, gain in _gains(node, measured))
    elif moves_data(node) or node.op_type in _CLAMPS | _SIGNS:
        yield from ((value, error) for value in (inputs if node.op_type in ("Max", "Min") else inputs[:1]))
    elif node.op_type in _CHOICES:
        yield from ((value, error) for value in inputs)
    elif _is_square(node):
        divided = _share(first, output, measured) if node.op_type == "ReduceSumSquare" else 1.0
        yield first, error if node.op_type == "ReduceL2" else error * math.sqrt(divided) / (2 * measured.rms(first))
    elif is_op(node, "Mul"):
        yield inputs[0], error / measured.rms(inputs[1])
        yield inputs[1], error / measured.rms(inputs[0])
    elif is_op(node, "Div"):
        yield first, error * measured.rms(inputs[1])
    elif power is not None and 0 < power < 1:
        made = measured.spread(output)
        if made is not None and math.isfinite(made.small):
            yield first, error / power * made.small ** (1 / power - 1)
    elif node.op_type in _MEANS:
        yield first, error / math.sqrt(_share(first, output, measured))
    elif is_op(node, "ReduceSum"):
        yield first, error * math.sqrt(_share(first, output, measured))


def _share(value: ir.Value, output: ir.Value, measured: Measured) -> float:
    """Return the number of elements of an output for each of what it is reduced from."""
    whole, made = measured.spread(value), measured.spread(output)
    return made.count / whole.count if whole is not None and made is not None and whole.count and made.count else 1.0


def _is_layer(node: ir.Node) -> bool:
    return is_op(node, "Conv", "ConvTranspose", "Gemm", "MatMul")


def _gains(node: ir.Node, measured: Measured) -> Iterator[tuple[ir.Value, float]]:
    """Yield the operands of a layer that are computed, each with what it multiplies a random error by."""
    for place in (0, 1):
        value, other = node.inputs[place], node.inputs[1 - place]
        if value is None or measured.is_constant(value):
            continue
        weights = float_constant(other)
        if weights is None:
            depth = value.shape[-1] if value.shape is not None and len(value.shape) else 1
            yield value, measured.rms(other) * math.sqrt(depth if isinstance(depth, int) else 1)
        elif weights.ndim > 1:
            channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
            yield value, math.sqrt(float(np.sum(weights**2)) / (channels if place == 0 else weights.shape[-2])) or 1.0


def _is_square(node: ir.Node) -> bool:
    if is_op(node, "Mul"):
        return node.inputs[0] is node.inputs[1]
    return is_op(node, "ReduceSumSquare", "ReduceL2") or _exponent(node) == 2


def _exponent(node: ir.Node) -> float | None:
    """Return the constant power that a node takes; None for other nodes."""
    if is_op(node, "Sqrt"):
        return 0.5
    exponent = float_constant(node_input(node, 1)) if is_op(node, "Pow") else None
    return float(exponent.reshape(-1)[0]) if exponent is not None and exponent.size == 1 else None
