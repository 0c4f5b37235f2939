"""Joins of unlike ranges: boxes in pixels and scores in one tensor, and columns of one layer in different units.

In 8 bits a tensor has one scale. An input of a Concat whose range is a hundredth of the joint one is left two or three
of 256 levels. So is a column of an output that another column exceeds a hundred times.

Where no layer follows, float costs next to nothing. The join stays in float, from the last layer before it to the
outputs, where an input would be left fewer than 16 levels, or so would a column by its constants. Where a layer reads
the join, that layer would be in float. Then an input must be left fewer than 4, and the rounding must make a twentieth
of the layer's output.

Elements that carry no information: NaN, infinities, and numbers far outside the real values, as masks have them.

A number means "nothing" where three things come together. The histogram has a gap, with a narrow cluster beyond it. A
range that reaches that far leaves what lies before the gap only a few of the 256 levels. And a constant of that size
leads to the tensor through operators that select, move or add, or an input that has the number in many places. Ordinary
outliers have no gap before them or come from no constant, and padding with an ordinary number leaves enough levels.

Tensors that must not become 8-bit integers on any backend, found from the graph and from what calibration saw.

| kind | found by | where |
|---|---|---|
| NaN or infinity | the count of such elements | `nothing` |
| numbers that mean "nothing", as masks have them | a gap in the histogram, and a constant beyond it | `nothing` |
| angles, divisors, arguments of logarithms and roots | what rounding would do to small values | `precision` |
| joins of unlike ranges | levels that the joint range leaves the narrowest input | `joins` |

A backend leaves every node in float that makes or reads such a tensor (`edgeq.model.int8_prediction`), or, where it
quantizes operands alone, every node that reads one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.hazard_precision import FEWEST, LEVELS, Measured, Spread, find_precise
from edgeq.calibrate.statistics import Statistics
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    GraphIndex,
    constant,
    consumers,
    indexed,
    is_op,
    moves_data,
    name_of,
    node_input,
    operator_of,
    readers,
)
from edgeq.model.prepare import PreparedModel
from edgeq.model.tensors import float_constant, output_channels

JOINED = "joins values of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
COLUMNS = "has columns of unlike ranges: 8 bits would leave the narrowest too few of 256 levels"
TAIL = "leads to or from a join of unlike ranges behind the last layer, where 8 bits gain nothing"

_FEWEST_INSIDE = FEWEST / 4
_MOST_NOISE = 0.05
_FEW_COLUMNS = 0.05
"""Share of columns that may be small: some of many features always are."""
_BOUNDED = ("ArgMax", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Tanh", "TopK")
_JOINED = {"Concat": slice(None), "ScatterElements": slice(0, 3, 2), "ScatterND": slice(0, 3, 2), "Where": slice(1, 3)}


def find_joins(measured: Measured) -> Mapping[str, str]:
    """Return the tensors around joins of unlike ranges, by name, each with the reason."""
    before_layers = _before_layers(measured.model)
    layers = sum(bool(operator_of(node).mac_rule) for node in measured.model.graph)
    found: dict[str, str] = {}
    for node in measured.model.graph:
        if node.domain not in MAIN_DOMAINS or not node.outputs[0].name:
            continue
        output = node.outputs[0]
        joined, columns = _joined_levels(node, measured), math.inf
        if node not in before_layers:
            alone = layers == 1 and bool(operator_of(node).mac_rule)  # it is all that can be quantized
            columns = math.inf if alone or _is_scored(output) else _column_levels(node, measured)
            if joined < FEWEST or columns < FEWEST:
                tail = dict.fromkeys(_tail(node, measured.model, before_layers), TAIL)
                found = {**tail, **found, name_of(output): JOINED if joined < FEWEST else COLUMNS}
        elif joined < _FEWEST_INSIDE and _is_lost(output, measured):
            found.update((name_of(value), JOINED) for value in (output, *_moved(output)))
    return found


def _joined_levels(node: ir.Node, measured: Measured) -> float:
    """Return the levels that the joint range leaves the narrowest of what a node joins."""
    places, joint = _JOINED.get(node.op_type), measured.spread(node.outputs[0])
    if places is None or joint is None or not joint.width:
        return math.inf
    widths = [_width(value, measured) for value in list(node.inputs)[places]]
    return min((joint.levels(width) for width in widths if width), default=math.inf)


def _width(value: ir.Value | None, measured: Measured) -> float:
    """Return the width of the range of an operand; 0 where it is not known, or all zero."""
    spread, numbers = measured.spread(value), float_constant(value)
    if spread is not None:
        # Zero and one other number need no levels between them.
        return spread.width if spread.magnitudes.size > 1 else 0.0
    finite = numbers[np.isfinite(numbers)] if numbers is not None else np.zeros(0)
    return float(finite.max(initial=0.0) - finite.min(initial=0.0))


def _column_levels(node: ir.Node, measured: Measured) -> float:
    """Return the levels that the widest column of an output leaves the narrowest but a few, by the constants that make
    them: columns of a weight, factors, and summands."""
    first = node_input(node, 0)
    weights = float_constant(node_input(node, 1))
    if is_op(node, "Conv", "Gemm", "MatMul") and weights is not None and weights.ndim > 1:
        channels = output_channels(node, weights.shape[-2:] if is_op(node, "MatMul") else weights.shape)
        axis = weights.ndim - 1 if weights.shape[-1] == channels and not is_op(node, "Conv") else 0
        if is_op(node, "Gemm"):
            axis = 0 if node.attributes.get_int("transB", 0) else 1
        sizes = np.sqrt(np.sum(np.moveaxis(weights, axis, 0).reshape(channels, -1) ** 2, axis=1)) * measured.rms(first)
        bias = float_constant(node_input(node, 2))
        sizes = sizes + np.abs(bias).reshape(-1) if bias is not None and bias.size == channels else sizes
    elif is_op(node, "Mul", "Add", "Div"):
        place = next((p for p in (0, 1) if float_constant(node.inputs[p]) is not None), None)
        factors = float_constant(node.inputs[place]) if place is not None else None
        if factors is None or place is None or (is_op(node, "Div") and place == 0):
            return math.inf
        other = measured.rms(node.inputs[1 - place])
        sizes = np.abs(factors).reshape(-1)
        if is_op(node, "Div"):
            sizes = 1 / sizes[sizes > 0]
        sizes = sizes + other if is_op(node, "Add") else sizes
    else:
        return math.inf
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return (
        float(np.quantile(sizes, _FEW_COLUMNS, method="lower") / sizes.max()) * LEVELS if sizes.size > 1 else math.inf
    )


def _before_layers(model: ir.Model) -> frozenset[ir.Node]:
    """Return the nodes from which some node that multiplies matrices can be reached."""
    found: set[ir.Node] = set()
    for node in reversed(list(model.graph)):
        behind = {reader for output in node.outputs for reader in readers(output)}
        if any(reader in found or operator_of(reader).mac_rule for reader in behind):
            found.add(node)
    return frozenset(found)


def _tail(node: ir.Node, model: ir.Model, before_layers: frozenset[ir.Node]) -> Iterator[str]:
    """Yield the tensors behind a join to the outputs, and those before it that only it and what lies behind it read,
    back to the last layers."""
    inside, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        for reader in (reader for output in at.outputs for reader in readers(output)):
            if reader not in inside:
                inside.add(reader)
                waiting.append(reader)
    for at in reversed(list(model.graph)):
        reading = {reader for output in at.outputs for reader in readers(output)}
        if reading and reading <= inside and at not in before_layers and not operator_of(at).mac_rule:
            inside.add(at)
    for at in model.graph:
        if at in inside and not operator_of(at).mac_rule:
            yield from (name_of(output) for output in at.outputs if output.name)


def _is_scored(value: ir.Value) -> bool:
    """Return whether all that reads a tensor maps it to a bounded interval, so that one error counts the same in all
    columns."""
    reading = [reader for tensor in (value, *_moved(value)) for reader in readers(tensor) if not moves_data(reader)]
    return bool(reading) and all(is_op(reader, *_BOUNDED) for reader in reading)


def _moved(value: ir.Value) -> Iterator[ir.Value]:
    """Yield what data movement makes of a tensor."""
    for reader in readers(value):
        if moves_data(reader):
            yield from reader.outputs
            yield from _moved(reader.outputs[0])


def _is_lost(value: ir.Value, measured: Measured) -> bool:
    """Return whether rounding a join makes too much of what the layers behind it give; where something else reads it,
    that is so."""
    for tensor in (value, *_moved(value)):
        noise = spread.noise if (spread := measured.spread(value)) is not None else 0.0
        for reader, place in consumers(tensor):
            weights = float_constant(node_input(reader, 1)) if place == 0 else None
            if moves_data(reader):
                continue
            if not is_op(reader, "Conv", "Gemm", "MatMul") or weights is None or weights.ndim < 2:
                return True
            channels = output_channels(reader, weights.shape[-2:] if is_op(reader, "MatMul") else weights.shape)
            made = noise * math.sqrt(float(np.sum(weights**2)) / channels)
            if made > _MOST_NOISE * measured.rms(reader.outputs[0]):
                return True
    return False


NONFINITE = "contains NaN or infinity, which 8 bits cannot represent"
NOTHING = 'contains numbers that mean "nothing", so far from the others that 8 bits would round those away'

_CLUSTER = 4.0
"""Largest ratio of the magnitudes in a cluster: masks are added twice."""
_GAP = 4.0
_CARRYING = DATA_MOVEMENT | {
    "Abs", "Add", "Cast", "Clip", "Concat", "ConstantOfShape", "GatherElements", "GatherND", "GlobalMaxPool", "Max",
    "Min", "Mul", "Neg", "ReduceMax", "ReduceMin", "Relu", "ScatterElements", "ScatterND", "Sub", "Sum", "TopK",
    "Trilu", "Where",
}  # fmt: skip
_LARGEST = 2**22


def find_nothing(measured: Measured) -> Mapping[str, str]:
    """Return the tensors that hold elements without meaning, by name, each with the reason."""
    graph = measured.model.graph
    found: dict[str, str] = {}
    reach = {name_of(value): _given(measured.spread(value)) for value in graph.inputs}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs if output.name)):
        node, spread, name = value.producer(), measured.spread(value), name_of(value)
        if node is not None and node.op_type in _CARRYING and node.domain in MAIN_DOMAINS:
            reach[name] = max((_filled(node), *(_reach(read, reach) for read in node.inputs)))
        far = far_value(spread, _fewest(value)) if spread is not None else 0.0
        if spread is not None and spread.nonfinite:
            found[name] = NONFINITE
        elif far and reach.get(name, 0.0) >= abs(far) / _CLUSTER:
            found[name] = NOTHING
            found.update(dict.fromkeys(_masks(node, far, reach, measured), NOTHING))
    return found


def _masks(node: ir.Node | None, far: float, reach: Mapping[str, float], measured: Measured) -> Iterator[str]:
    """Yield the operands that bring a number into what a node makes; some hold nothing but it and zero."""
    for value in node.inputs if node is not None else ():
        spread = measured.spread(value)
        if spread is not None and reach.get(name_of(value), 0.0) and spread.width >= abs(far) / _CLUSTER:
            yield name_of(value)


def _fewest(value: ir.Value) -> int:
    """Return the levels that a tensor needs. Operators that select or move cost as much in float, but layers do not."""
    return FEWEST if any(operator_of(reader).mac_rule for reader in readers(value)) else 4 * FEWEST


def far_value(spread: Spread, fewest: int = FEWEST) -> float:
    """Return the outermost number beyond the gap of a histogram, where the range would leave what lies before the gap
    fewer levels than `fewest`; 0 where there is none."""
    beyond = _beyond(spread)
    if beyond < 2:  # none, one or two numbers lie before it: 8 bits have them
        return 0.0
    before = spread.magnitudes[beyond - 1]
    if spread.magnitudes[beyond] < _GAP * before or spread.levels(2 * before) >= fewest:
        return 0.0
    return spread.high if spread.high > -spread.low else spread.low


def _beyond(spread: Spread) -> int:
    """Return the place where the cluster of the largest magnitudes begins."""
    largest = spread.magnitudes[-1] if spread.magnitudes.size else 0.0
    return int(np.searchsorted(spread.magnitudes, largest / _CLUSTER))


def _given(spread: Spread | None) -> float:
    """Return the magnitude of an input's number that may mean nothing: it occurs more than once, so that it is no
    outlier, with a gap before it, or in a mask with nothing but zeros."""
    if spread is None or not spread.magnitudes.size or spread.counts[-1] < 2:
        return 0.0
    alone = _beyond(spread) == spread.magnitudes.size - 1 and (spread.magnitudes.size == 1 or far_value(spread))
    return float(spread.magnitudes[-1]) if alone else 0.0


def _reach(value: ir.Value | None, reach: Mapping[str, float]) -> float:
    """Return the largest magnitude that a constant is known to bring into a value."""
    known = constant(value)
    if known is None or known.dtype.kind != "f" or not 0 < known.size <= _LARGEST:
        return reach.get(name_of(value), 0.0)
    return float(np.abs(known).max()) if not np.isnan(known).any() else math.inf


def _filled(node: ir.Node) -> float:
    """Return the magnitude that a ConstantOfShape fills in."""
    tensor = node.attributes.get_tensor("value") if node.op_type == "ConstantOfShape" else None
    return float(np.abs(tensor.numpy().astype(np.float64)).max(initial=0.0)) if tensor is not None else 0.0


def find_hazards(model: ir.Model | GraphIndex, statistics: Statistics) -> Mapping[str, str]:
    """Return the tensors of a prepared model that must not be in 8 bits, by name, each with the reason.

    The reason follows the tensor's name in a sentence. Tensors without statistics are judged by the graph alone.
    """
    measured = Measured(indexed(model), statistics)
    return {**find_joins(measured), **find_precise(measured), **find_nothing(measured)}


def calibrated(prepared: PreparedModel, statistics: Statistics) -> PreparedModel:
    """Return a prepared model with its hazards, and a note for each kind of them."""
    hazards = find_hazards(prepared.graph, statistics)
    alike: dict[str, list[str]] = {}
    for name, reason in hazards.items():
        alike.setdefault(reason, []).append(name)
    notes = (f"in float: tensor {names[0]!r}{_others(names)} {reason}" for reason, names in alike.items())
    return replace(prepared, hazards=hazards, notes=(*prepared.notes, *notes))


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
