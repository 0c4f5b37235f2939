"""Find the tensors that must not become 8-bit integers on any backend, from the graph and the calibration statistics.

| kind | found by |
|---|---|
| NaN or infinity | the number of such elements |
| numbers that mean "nothing", such as those in masks | a gap in the histogram, and a constant beyond it |
| angles, indices, divisors, arguments of logarithms and roots | the effect of rounding on small values |
| tensors that the samples leave empty | values that are all zero |
| joins of unlike ranges | the levels that the joint range leaves for the narrowest input |

A backend keeps a node in float if the node writes or reads such a tensor (`edgeq.model.int8_prediction`). By contrast,
a backend that quantizes only operands keeps a node in float only if the node reads such a tensor.

**Small values** (`find_precise`). Rounding to 8 bits adds an error of the same size to all values of a tensor, large or
small. A sum tolerates this. Divisors, logarithms and roots do not if some values are close to zero compared with the
range. Sin and Cos do not if the range covers many periods. A float that becomes an index, such as that of a Gather,
must be exact.

For each argument of these operators, edgeq computes the largest error that the argument may have, as a standard
deviation. It follows this error upstream through operators whose effect on an error is known (products, sums, means,
roots, layers). Every tensor on this path stays in float if its rounding to 8 bits would cause a larger error. edgeq
stops at all other operators. Once its path has passed a layer, it also stops at activation functions, because values
inside a network are quantized anyway. The mean square that a norm divides by always stays in float.

**Joins of unlike ranges** (`find_joins`). A tensor may join values of very different sizes, such as boxes in pixels and
scores, or columns of one layer in different units. In 8 bits a tensor has one scale. A Concat input with a hundredth of
the joint range gets only two or three of 256 levels. The same is true for a column of a layer's output if another
column is a hundred times larger.

If no layer follows the join, running the join in float costs almost nothing. The tensors from the last layer before the
join to the outputs then stay in float if an input of the join gets fewer than 16 levels. They also stay in float if a
column gets fewer than 16 levels. edgeq estimates the levels of a column from constants. If a layer reads the join, that
layer would have to run in float too. The limits are then stricter: an input must get fewer than 4 levels, and the
rounding error must exceed a twentieth of the layer's output.

**Elements without information** (`find_nothing`). These are NaN, infinities, and numbers far outside the real values,
such as those in masks.

A number means "nothing" if three conditions are true:

- The histogram has a gap, with a narrow cluster beyond it that consists of a few numbers.
- A range that includes the cluster leaves only a few of the 256 levels for the values before the gap.
- A constant of that size reaches the tensor through operators that select, move or add, or an input contains the number
  many times.

Ordinary outliers have no gap before them, or no constant causes them. Padding with an ordinary number leaves enough
levels.

**Tensors that the samples leave empty** (`find_unseen`). An input such as a cache, a mask or a second camera may be
zero in all samples. Its range would be 0..0, and 8 bits would round all values in use to whole numbers. An empty range
is not evidence, so the tensor stays in float. So do the tensors that are computed only from such tensors, and zeros
that are computed from them. The range of a sum of such a tensor and another one is too narrow, so the sum stays in
float up to the next layer. Zeros that an operator makes of other values, such as those of a Relu whose input is
negative, do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from edgeq.calibration.statistics import FINITE, Float64s, Int64s, Nonfinite, Statistics, TensorStatistics
from edgeq.model.exact import Exactness
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    GraphIndex,
    before_layers,
    clamp_bounds,
    constant,
    consumers,
    indexed,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    readers,
    reads,
)
from edgeq.model.parameters import float_constant, output_channels
from edgeq.model.prepare import PreparedModel

LEVELS = 255
"""Number of steps of an 8-bit range."""
MIN_LEVELS = 16
"""Smallest number of levels that a tensor needs. With fewer levels, it has lost more than four of its eight bits."""
# Share of the nonzero values that count as small.
_SMALL = 0.01


@dataclass(frozen=True)
class Spread:
    """Hold the magnitudes of the finite values of one tensor, taken from the tensor's histogram, as float64.

    Attributes:
        low, high: ends of the range, which includes zero.
        magnitudes: magnitudes in ascending order, without zero; one for each bin and sign.
        counts: number of values with each magnitude.
        zeros: number of values that are zero.
        nonfinite: numbers of NaN and infinite elements.
    """

    low: float
    high: float
    magnitudes: Float64s
    counts: Int64s
    zeros: int
    nonfinite: Nonfinite = FINITE

    @classmethod
    def of(cls, tensor: TensorStatistics) -> Spread:
        """Return the spread of a tensor from its statistics."""
        lower, upper = tensor.histogram.edges()
        middle = np.where(tensor.histogram.keys == 0, 0.0, np.abs(lower + upper) / 2)
        counts, order = tensor.histogram.counts, np.argsort(middle, kind="stable")
        middle, counts = middle[order], counts[order]
        # Zeros are counted apart, because every range represents them exactly.
        zeros = int(np.searchsorted(middle, 0.0, side="right"))
        low, high = (min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)) if tensor.count else (0.0, 0.0)
        return cls(low, high, middle[zeros:], counts[zeros:], int(counts[:zeros].sum()), tensor.nonfinite)

    @property
    def width(self) -> float:
        """Return the length of the range."""
        return self.high - self.low

    @property
    def noise(self) -> float:
        """Return the standard deviation of the rounding error in 8 bits: the step over the square root of twelve."""
        return self.width / LEVELS / math.sqrt(12)

    def levels(self, width: float) -> float:
        """Return how many steps of the range fit into an interval of `width`."""
        return width / self.width * LEVELS if self.width else math.inf

    @cached_property
    def rms(self) -> float:
        """Return the root mean square."""
        total = int(self.counts.sum()) + self.zeros
        return math.sqrt(float(np.sum(self.counts * self.magnitudes**2)) / total) if total else 0.0

    @property
    def count(self) -> int:
        """Return the number of finite values."""
        return int(self.counts.sum()) + self.zeros

    @property
    def smallest(self) -> float:
        """Return the smallest nonzero magnitude; infinity if all values are zero."""
        return float(self.magnitudes[0]) if self.magnitudes.size else math.inf

    @cached_property
    def small(self) -> float:
        """Return the magnitude that bounds the smallest hundredth of the nonzero values. Return infinity if all values
        are zero.
        """
        if not self.magnitudes.size:
            return math.inf
        sums = np.cumsum(self.counts)
        return float(self.magnitudes[np.searchsorted(sums, _SMALL * sums[-1])])


class ModelSpreads:
    """Pair a prepared model with the spreads of its tensors.

    Attributes:
        model: the prepared model.
        constants: names of the tensors that have the same values in each run.
        index_casts: Cast nodes whose output leads to an index.
    """

    def __init__(self, graph: GraphIndex, statistics: Statistics) -> None:
        self.model = graph.model
        self.constants = graph.computed_constants
        self.index_casts = Exactness(graph).index_casts()
        self._tensors = statistics.tensors
        self._spreads: dict[str, Spread | None] = {}

    def spread(self, value: ir.Value | None) -> Spread | None:
        """Return the spread of a tensor, or None if the tensor has no statistics."""
        return self.spread_of(name_of(value))

    def spread_of(self, name: str) -> Spread | None:
        """Return the spread of the tensor `name`, or None if the tensor has no statistics."""
        if name not in self._spreads:
            tensor = self._tensors.get(name)
            self._spreads[name] = None if tensor is None or not tensor.samples else Spread.of(tensor)
        return self._spreads[name]

    def rms(self, value: ir.Value | None) -> float:
        """Return the root mean square of a tensor or constant. Return 1 if it is zero or unknown."""
        spread = self.spread(value)
        if spread is not None:
            return spread.rms or 1.0
        values = self.numbers(value)
        return float(np.sqrt(np.mean(values**2))) or 1.0 if values is not None and values.size else 1.0

    def is_constant(self, value: ir.Value | None) -> bool:
        """Return whether a tensor has the same values in each run."""
        return name_of(value) in self.constants

    def numbers(self, value: ir.Value | None) -> Float64s | None:
        """Return the values of a float constant; None for computed values and other types."""
        values = constant(value)
        return values.astype(np.float64) if values is not None and values.dtype.kind == "f" else None


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


JOINED = "joins values of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
COLUMNS = "has columns of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
TAIL = "leads to or from a join of unlike ranges after the last layer, where 8 bits gain nothing"

_MIN_INNER_LEVELS = MIN_LEVELS / 4
_MAX_NOISE = 0.05
# Share of the columns that may be narrow. In a layer with many features, some are always narrow.
_FEW_COLUMNS = 0.05
_BOUNDED = ("ArgMax", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Tanh", "TopK")
_JOINED = {"Concat": slice(None), "ScatterElements": slice(0, 3, 2), "ScatterND": slice(0, 3, 2), "Where": slice(1, 3)}


def find_joins(measured: ModelSpreads) -> Mapping[str, str]:
    """Return name → reason, for the tensors next to joins of unlike ranges that must stay in float."""
    # After the last layer, float costs almost nothing. So the limits depend on the place in the graph.
    leading = before_layers(measured.model)
    layers = sum(bool(operator_of(node).mac_rule) for node in measured.model.graph)
    reasons: dict[str, str] = {}
    for node in measured.model.graph:
        if node.domain not in MAIN_DOMAINS or not node.outputs[0].name:
            continue
        output = node.outputs[0]
        joined, columns = _joined_levels(node, measured), math.inf
        if node not in leading:
            # Whether this layer is the only layer, so that nothing else could be quantized.
            alone = layers == 1 and bool(operator_of(node).mac_rule)
            # Bounded functions such as Sigmoid make errors in all columns matter alike, whatever the ranges of the
            # columns.
            columns = math.inf if alone or _is_scored(output) else _column_levels(node, measured)
            if joined < MIN_LEVELS or columns < MIN_LEVELS:
                # A tensor keeps the reason that it got before, because that is the more specific one.
                tail = dict.fromkeys(_tail(node, measured.model, leading), TAIL)
                reasons = {**tail, **reasons, name_of(output): JOINED if joined < MIN_LEVELS else COLUMNS}
        elif joined < _MIN_INNER_LEVELS and _is_lost(output, measured):
            reasons.update((name_of(value), JOINED) for value in (output, *_moved(output)))
    return reasons


def _joined_levels(node: ir.Node, measured: ModelSpreads) -> float:
    """Return how many levels the range of a join leaves for its narrowest input. Return infinity for other nodes."""
    places, joint = _JOINED.get(node.op_type), measured.spread(node.outputs[0])
    if places is None or joint is None or not joint.width:
        return math.inf
    widths = [_width(value, measured) for value in list(node.inputs)[places]]
    return min((joint.levels(width) for width in widths if width), default=math.inf)


def _width(value: ir.Value | None, measured: ModelSpreads) -> float:
    """Return the width of an operand's range; 0 if it is not known or all values are zero."""
    spread, numbers = measured.spread(value), float_constant(value)
    if spread is not None:
        # A tensor that contains only zero and one other number needs no levels between them.
        return spread.width if spread.magnitudes.size > 1 else 0.0
    finite = numbers[np.isfinite(numbers)] if numbers is not None else np.zeros(0)
    return float(finite.max(initial=0.0) - finite.min(initial=0.0))


def _column_levels(node: ir.Node, measured: ModelSpreads) -> float:
    """Return how many levels the widest column of an output leaves for its narrow columns. The widths are estimated
    from constants: the columns of a weight, factors, or summands. The narrowest columns, a share of `_FEW_COLUMNS`, are
    ignored.
    """
    data = node_input(node, 0)
    weights = float_constant(node_input(node, 1))
    if is_op(node, "Conv", "Gemm", "MatMul") and weights is not None and weights.ndim > 1:
        channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
        axis = weights.ndim - 1 if weights.shape[-1] == channels and not is_op(node, "Conv") else 0
        if is_op(node, "Gemm"):
            axis = 0 if node.attributes.get_int("transB", 0) else 1
        sizes = np.sqrt(np.sum(np.moveaxis(weights, axis, 0).reshape(channels, -1) ** 2, axis=1)) * measured.rms(data)
        bias = float_constant(node_input(node, 2))
        sizes = sizes + np.abs(bias).reshape(-1) if bias is not None and bias.size == channels else sizes
    elif is_op(node, "Mul", "Add", "Div"):
        place = next((p for p in (0, 1) if float_constant(node.inputs[p]) is not None), None)
        factors = float_constant(node.inputs[place]) if place is not None else None
        if factors is None or place is None or (is_op(node, "Div") and place == 0):
            return math.inf
        operand_rms = measured.rms(node.inputs[1 - place])
        sizes = np.abs(factors).reshape(-1)
        if is_op(node, "Div"):
            sizes = 1 / sizes[sizes > 0]
        sizes = sizes + operand_rms if is_op(node, "Add") else sizes
    else:
        return math.inf
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return (
        float(np.quantile(sizes, _FEW_COLUMNS, method="lower") / sizes.max()) * LEVELS if sizes.size > 1 else math.inf
    )


def _tail(node: ir.Node, model: ir.Model, leading: frozenset[ir.Node]) -> Iterator[str]:
    """Yield the names of the tensors from a join to the outputs. A tensor between the last layers and the join is
    included too if only this part of the graph reads it.
    """
    inside, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        for reader in (reader for output in at.outputs for reader in readers(output)):
            if reader not in inside:
                inside.add(reader)
                waiting.append(reader)
    for at in reversed(list(model.graph)):
        reading = {reader for output in at.outputs for reader in readers(output)}
        if reading and reading <= inside and at not in leading and not operator_of(at).mac_rule:
            inside.add(at)
    for at in model.graph:
        if at in inside and not operator_of(at).mac_rule:
            yield from (name_of(output) for output in at.outputs if output.name)


def _is_scored(value: ir.Value) -> bool:
    """Return whether every reader of a tensor maps it to a bounded interval, as Sigmoid does. An error then matters
    equally in all columns.
    """
    reading = [reader for tensor in (value, *_moved(value)) for reader in readers(tensor) if not moves_data(reader)]
    return bool(reading) and all(is_op(reader, *_BOUNDED) for reader in reading)


def _moved(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the tensors that result from moving a tensor's data."""
    for reader in readers(value):
        if moves_data(reader):
            yield from reader.outputs
            yield from _moved(reader.outputs[0])


def _is_lost(value: ir.Value, measured: ModelSpreads) -> bool:
    """Return whether a layer that reads a join receives too much of the join's rounding error, or whether an operator
    that is not a layer reads the join.
    """
    for tensor in (value, *_moved(value)):
        noise = spread.noise if (spread := measured.spread(value)) is not None else 0.0
        for reader, place in consumers(tensor):
            weights = float_constant(node_input(reader, 1)) if place == 0 else None
            if moves_data(reader):
                continue
            if not is_op(reader, "Conv", "Gemm", "MatMul") or weights is None or weights.ndim < 2:
                return True
            channels = output_channels(reader, weights.shape[-2:] if is_op(reader, "MatMul") else weights.shape)
            output_noise = noise * math.sqrt(float(np.sum(weights**2)) / channels)
            if output_noise > _MAX_NOISE * measured.rms(reader.outputs[0]):
                return True
    return False


UNSEEN = "depends on values of input {!r} that the calibration samples do not have: its range in use is not known"
_SUMS = ("Add", "Mul", "Sub", "Sum")
_NORMALIZED = (*_BOUNDED, "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization")
NONFINITE = "contains NaN or infinity, which 8 bits cannot represent"
NOTHING = 'contains numbers that mean "nothing", so far from the others that 8 bits would round the others to zero'

# Largest ratio between two magnitudes in a cluster. It is not 1, because a mask may be added twice.
_CLUSTER = 4.0
# Smallest ratio between a cluster and the values before it. Ordinary tails have no gap of two octaves.
_GAP = 4.0
# Largest number of different numbers in a cluster, counted in sixteenths of an octave. Boxes in pixels next to scores
# are a cluster too, but they fill it.
_STEPS, _MAX_NUMBERS = 16, 4
_CARRYING = DATA_MOVEMENT | {
    "Abs", "Add", "Cast", "Clip", "Concat", "ConstantOfShape", "GatherElements", "GatherND", "GlobalMaxPool", "Max",
    "Min", "Mul", "Neg", "ReduceMax", "ReduceMin", "Relu", "ScatterElements", "ScatterND", "Sub", "Sum", "TopK",
    "Trilu", "Where",
}  # fmt: skip
# Number of elements of the largest constant whose values are read. Larger ones are tables and slow to read.
_LARGEST = 2**22


def find_nothing(measured: ModelSpreads) -> Mapping[str, str]:
    """Return name → reason, for tensors that contain elements without meaning."""
    reasons: dict[str, str] = {}
    reach: dict[str, float] = {}
    for value, sentinel in _find_sentinels(measured, reach):
        if math.isinf(sentinel):
            reasons[name_of(value)] = NONFINITE
        else:
            reasons[name_of(value)] = NOTHING
            reasons.update(dict.fromkeys(_masks(value.producer(), sentinel, reach, measured), NOTHING))
    return reasons


def _find_sentinels(measured: ModelSpreads, reach: dict[str, float]) -> Iterator[tuple[ir.Value, float]]:
    """Yield each tensor that contains numbers that mean "nothing", with the outermost of these numbers. It is infinity
    if the tensor contains NaN or infinities.

    Args:
        reach: is filled with the largest magnitude that constants can bring into each tensor.
    """
    graph = measured.model.graph
    reach.update((name_of(value), _sentinel_magnitude(measured.spread(value))) for value in graph.inputs)
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs if output.name)):
        node, spread, name = value.producer(), measured.spread(value), name_of(value)
        if node is not None and node.op_type in _CARRYING and node.domain in MAIN_DOMAINS:
            reach[name] = max((_filled(node), *(_reach(operand, reach) for operand in node.inputs)))
        elif node is not None and (bias := node_input(node, operator_of(node).bias)) is not None:
            # A sum with a mask may have become the bias of a layer. A constant bias is not a mask.
            reach[name] = reach.get(name_of(bias), 0.0)
        sentinel = find_sentinel(spread, _required_levels(value)) if spread is not None else 0.0
        if spread is not None and spread.nonfinite:
            yield value, math.inf
        elif sentinel and reach.get(name, 0.0) >= abs(sentinel) / _CLUSTER:
            yield value, sentinel


def find_limits(model: ir.Model | GraphIndex, statistics: Statistics) -> Mapping[str, float]:
    """Return name → smallest magnitude of a number that means "nothing", for tensors that contain such numbers.

    If only NaN and infinities mean "nothing", the limit lies above all finite numbers that were seen, by the width of a
    gap: an integer model represents an infinity by a large number.
    """
    measured = ModelSpreads(indexed(model), statistics)
    limits = {}
    for value, sentinel in _find_sentinels(measured, {}):
        spread = measured.spread(value)
        if math.isfinite(sentinel):
            limits[name_of(value)] = abs(sentinel) / _CLUSTER
        elif spread is not None and spread.width and (spread.nonfinite.below or spread.nonfinite.above):
            limits[name_of(value)] = _GAP * max(spread.high, -spread.low)
    return limits


def _masks(node: ir.Node | None, sentinel: float, reach: Mapping[str, float], measured: ModelSpreads) -> Iterator[str]:
    """Yield the operands that bring the number `sentinel` into a node's output. Some of these operands contain no
    numbers other than `sentinel` and zero.
    """
    for value in node.inputs if node is not None else ():
        spread = measured.spread(value)
        if spread is not None and reach.get(name_of(value), 0.0) and spread.width >= abs(sentinel) / _CLUSTER:
            yield name_of(value)


def _required_levels(value: ir.Value) -> int:
    """Return the number of levels that a tensor needs. The number is larger if no layer reads the tensor, because
    operators other than layers cost little in float.
    """
    return MIN_LEVELS if any(operator_of(reader).mac_rule for reader in readers(value)) else 4 * MIN_LEVELS


def find_sentinel(spread: Spread, fewest: int = MIN_LEVELS) -> float:
    """Return the outermost number beyond the gap of a histogram. Return 0 if there is no gap, or if the range leaves at
    least `fewest` levels for the values before the gap.
    """
    beyond = _beyond(spread)
    if np.unique(spread.magnitudes[:beyond]).size < 2:  # 8 bits can represent one magnitude before the gap.
        return 0.0
    bulk_end, cluster = spread.magnitudes[beyond - 1], spread.magnitudes[beyond:]
    # Without a gap these are outliers, and with enough levels the gap costs nothing.
    if cluster[0] < _GAP * bulk_end or spread.levels(2 * bulk_end) >= fewest:
        return 0.0
    if len(np.unique(np.floor(_STEPS * np.log2(cluster)))) > _MAX_NUMBERS:  # a quantity with another unit
        return 0.0
    return spread.high if spread.high > -spread.low else spread.low


def _beyond(spread: Spread) -> int:
    """Return the index at which the cluster of the largest magnitudes begins."""
    largest = spread.magnitudes[-1] if spread.magnitudes.size else 0.0
    return int(np.searchsorted(spread.magnitudes, largest / _CLUSTER))


def _sentinel_magnitude(spread: Spread | None) -> float:
    """Return the magnitude of a number in an input that may mean "nothing"; 0 if there is no such number. The number
    must occur more than once, because otherwise it may be an outlier. There must be a gap before it, or all other
    values must be zero, as in a mask.
    """
    if spread is None or not spread.magnitudes.size or spread.counts[-1] < 2:
        return 0.0
    # A mask as an input contains one number only, apart from zeros.
    alone = _beyond(spread) == spread.magnitudes.size - 1 and (spread.magnitudes.size == 1 or find_sentinel(spread))
    return float(spread.magnitudes[-1]) if alone else 0.0


def _reach(value: ir.Value | None, reach: Mapping[str, float]) -> float:
    """Return the largest magnitude that constants can bring into a value, as far as it is known."""
    values = constant(value)
    if values is None or values.dtype.kind != "f" or not 0 < values.size <= _LARGEST:
        return reach.get(name_of(value), 0.0)
    return float(np.abs(values).max()) if not np.isnan(values).any() else math.inf


def _filled(node: ir.Node) -> float:
    """Return the magnitude of the fill value of a ConstantOfShape; 0 for other nodes."""
    tensor = node.attributes.get_tensor("value") if node.op_type == "ConstantOfShape" else None
    return float(np.abs(tensor.numpy().astype(np.float64)).max(initial=0.0)) if tensor is not None else 0.0


def find_unseen(measured: ModelSpreads) -> Mapping[str, str]:
    """Return tensor → input, for tensors whose range in use is not known, because the samples leave that input empty.

    A model input without statistics, such as a mask of integers, counts as empty if zeros are computed from it.
    """
    graph = measured.model.graph
    sources: dict[str, dict[str, None]] = {name_of(value): {name_of(value): None} for value in graph.inputs}
    unseen = {name_of(value): name_of(value) for value in graph.inputs if _is_empty(measured.spread(value))}
    partly: dict[str, str] = {}
    for node in graph:
        operands = [value for value in reads(node) if not measured.is_constant(value)]
        # The shape of an empty tensor is known.
        behind = [] if is_op(node, "Shape", "Size") else [value for value in operands if name_of(value) in unseen]
        inputs = dict.fromkeys(name for value in operands for name in sources.get(name_of(value), ()))
        for output in node.outputs:
            name = name_of(output)
            sources[name] = inputs
            if (behind and len(behind) == len(operands)) or (_is_empty(measured.spread(output)) and behind):
                unseen[name] = unseen[name_of(behind[0])]
            elif _is_empty(measured.spread(output)) and inputs and not _makes_zeros(node, measured):
                unseen[name] = _likely_cause(inputs, measured)
            elif behind and is_op(node, *_SUMS):
                partly[name] = unseen[name_of(behind[0])]
            elif not (operator_of(node).mac_rule or is_op(node, *_NORMALIZED)):
                causes = [unseen.get(name_of(value)) or partly.get(name_of(value)) for value in operands]
                if causes and causes[0] and all(causes):
                    partly[name] = causes[0]
    causes_by_name = {**unseen, **partly}
    return {name: source for name, source in causes_by_name.items() if name and measured.spread_of(name) is not None}


def _is_empty(spread: Spread | None) -> bool:
    """Return whether a tensor has no elements other than zero in all samples."""
    return spread is not None and not spread.magnitudes.size and not spread.nonfinite


def _makes_zeros(node: ir.Node, measured: ModelSpreads) -> bool:
    """Return whether a node makes zeros by itself: it clamps other values, multiplies them by zero, or reads zeros that
    another node made.
    """
    if any(_is_empty(measured.spread(value)) for value in node.inputs):
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
    empty = (name for name, spread in spreads.items() if _is_empty(spread))
    unknown = (name for name, spread in spreads.items() if spread is None)
    return next(empty, None) or next(unknown, None) or next(iter(names))


def find_hazards(model: ir.Model | GraphIndex, statistics: Statistics) -> Mapping[str, str]:
    """Return name → reason, for tensors of a prepared model that must not be in 8 bits.

    The reason completes a sentence that begins with the tensor's name. Tensors without statistics are judged by the
    graph alone.
    """
    measured = ModelSpreads(indexed(model), statistics)
    unseen = {name: UNSEEN.format(source) for name, source in find_unseen(measured).items()}
    # A later reason replaces an earlier one. What no sample shows comes last, because no measured reason holds without
    # values.
    return {**find_joins(measured), **find_precise(measured), **find_nothing(measured), **unseen}


def with_hazards(prepared: PreparedModel, statistics: Statistics) -> PreparedModel:
    """Return a copy of a prepared model, with its hazards and its unseen inputs."""
    measured = ModelSpreads(prepared.graph, statistics)
    unseen = tuple(name for name in prepared.graph.inputs if _is_empty(measured.spread_of(name)))
    return replace(prepared, hazards=find_hazards(prepared.graph, statistics), unseen=unseen)


def hazards_behind_layers(graph: GraphIndex, hazards: Mapping[str, str]) -> Mapping[str, str]:
    """Return the hazards that cost no layer in float: tensors that only nodes after the last layers write and read."""
    leading = before_layers(graph.model)

    def costs_layer(name: str) -> bool:
        value = graph.values[name]
        nodes = (node for node in (value.producer(), *readers(value)) if node is not None)
        return any(node in leading or operator_of(node).mac_rule for node in nodes)

    return {name: reason for name, reason in hazards.items() if not costs_layer(name)}


def hazard_notes(hazards: Mapping[str, str], prefix: str) -> tuple[str, ...]:
    """Return a note for each kind of hazard. It begins with `prefix`, which states how the tensors are computed."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in hazards.items():
        names_by_reason.setdefault(reason, []).append(name)
    return tuple(
        f"{prefix}: tensor {names[0]!r}{_more_note(names)} {reason}" for reason, names in names_by_reason.items()
    )


def _more_note(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
