"""Find elements without information. These are NaN, infinities, and numbers far outside the real values, such as those
in masks.

A number means "nothing" if three conditions are true:

- The histogram has a gap, with a narrow cluster beyond it that consists of a few numbers.
- A range that includes the cluster leaves only a few of the 256 levels for the values before the gap.
- A constant of that size reaches the tensor through operators that select, move or add, or an input contains the number
  many times.

Ordinary outliers have no gap before them, or no constant causes them. Padding with an ordinary number leaves enough
levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from edgeq.calibration.spreads import MIN_LEVELS, ModelSpreads, Spread
from edgeq.calibration.statistics import Statistics
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    GraphIndex,
    constant,
    indexed,
    name_of,
    node_input,
    operator_of,
    readers,
)

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
