"""Elements that carry no information: NaN, infinities, and numbers far outside the real values, as masks have them.

A number means "nothing" where three things come together. The histogram has a gap, with a narrow cluster beyond it. A
range that reaches that far leaves what lies before the gap only a few of the 256 levels. And a constant of that size
leads to the tensor through operators that select, move or add, or an input that has the number in many places. Ordinary
outliers have no gap before them or come from no constant, and padding with an ordinary number leaves enough levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from edgeq.calibrate.hazards.measured import FEWEST, Measured, Spread
from edgeq.graph.operators import DATA_MOVEMENT, operator_of
from edgeq.graph.query import MAIN_DOMAINS, constant, name_of, readers

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
