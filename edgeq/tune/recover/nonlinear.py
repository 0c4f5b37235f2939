"""Ranges of tensors before a non-linear function: the least error behind the function, not before it.

A convolution before SiLU may reach from -139 to 23, and SiLU maps all that is below -8 to nearly zero. Steps spent
there are wasted. So the range is searched that minimises, over the histogram of the tensor,

    sum over bins  count * sum over ends (f(quantized centre) - f(centre))^2

where f is whatever follows element by element (`elementwise`), under whatever operator names.

The element-wise part behind a tensor, as a function of one number: what the rest of the network sees of it.

After a convolution often comes an activation function: one node (Sigmoid, HardSwish), or several (x * Sigmoid(x), the
Erf form of GELU). However it is written, it maps each element on its own, so it is found by following the tensor
through element-wise nodes, and evaluated by running them on a list of numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.calibrate.methods.mse import COARSE, REFINEMENTS
from edgeq.calibrate.range_method import Grid
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import TensorStatistics, linear_of
from edgeq.model.graph import MAIN_DOMAINS, MICROSOFT, GraphIndex, name_of, operator_of, readers
from edgeq.run.session import SessionSettings
from edgeq.tune.recover.layers import Floats, initializer
from edgeq.tune.recover.stepper import open_piece

Function = Callable[[NDArray[Any]], NDArray[Any]]
"""Numbers → [ends, numbers], float64 where not mentioned otherwise."""


@dataclass(frozen=True, eq=False)
class Follower:
    """The element-wise part behind a tensor.

    Attributes:
        tensor: name of the tensor where it begins.
        nodes: in the order of the graph; empty where nothing element-wise follows.
        ends: names of the tensors that other nodes read or that are graph outputs; among them `tensor` itself where it
            is read directly.
    """

    tensor: str
    nodes: tuple[ir.Node, ...]
    ends: tuple[str, ...]


class Followers:
    """Finds and evaluates the element-wise parts behind tensors of one model's main graph."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._values = GraphIndex(model).values
        self._nodes = list(model.graph)
        self._places = {node: place for place, node in enumerate(self._nodes)}

    def of(self, tensor: str) -> Follower:
        """The nodes behind `tensor` that compute each element from one element of it and scalar constants."""
        if tensor not in self._values:
            return Follower(tensor, (), ())
        start = self._values[tensor]
        known = [start]
        nodes: list[ir.Node] = []
        waiting = self._behind(start)
        while waiting:
            node = self._nodes[heapq.heappop(waiting)]
            # A node is queued once for each tensor that it reads.
            if node.outputs[0] not in known and _is_elementwise(node, known):
                nodes.append(node)
                known.append(node.outputs[0])
                for behind in self._behind(node.outputs[0]):
                    heapq.heappush(waiting, behind)
        ends = [v for v in known if v.is_graph_output() or any(reader not in nodes for reader in readers(v))]
        return Follower(tensor, tuple(nodes), tuple(name_of(end) for end in ends))

    def function(self, follower: Follower, dtype: type[np.floating[Any]] = np.float64) -> Function:
        """The function that the nodes of `follower` compute (in float32), for any number of calls.

        Args:
            dtype: of its results.
        """
        computed = [name for name in follower.ends if name != follower.tensor]
        if not computed:
            return lambda numbers: np.tile(np.asarray(numbers, dtype).reshape(1, -1), (len(follower.ends), 1))
        feed = {follower.tensor: np.zeros(1, np.float32)}
        settings = SessionSettings(optimization="basic", intra_op_threads=1)
        session = open_piece(self._model, follower.nodes, feed, computed, settings)

        def run(numbers: NDArray[Any]) -> NDArray[Any]:
            """[ends, n]: what each end computes from n values of the followed tensor."""
            flat = np.ascontiguousarray(numbers, np.float32).reshape(-1)
            found = dict(zip(computed, session.run(computed, {follower.tensor: flat}), strict=True))
            ends = [found.get(name, flat) for name in follower.ends]
            return np.stack([np.asarray(end, dtype).reshape(-1) for end in ends])

        return run

    def _behind(self, value: ir.Value) -> list[int]:
        """Places in the graph of the nodes that read a value, a heap."""
        return sorted(self._places[node] for node in readers(value))


def _is_elementwise(node: ir.Node, known: list[ir.Value]) -> bool:
    """Whether each element of a node's one output comes from one element of `known` tensors and scalar constants."""
    row = operator_of(node)
    if not row.elementwise or node.domain not in (*MAIN_DOMAINS, MICROSOFT) or len(node.outputs) != 1:
        return False
    places = len(node.inputs) if len(row.activations) > 1 else 1
    data, options = node.inputs[:places], node.inputs[places:]
    return all(value in known or _is_scalar(value) for value in data) and all(map(_is_scalar, options))


def _is_scalar(value: ir.Value | None) -> bool:
    """Whether an input is a constant float32 number, or left out."""
    tensor = initializer(value)
    return value is None or (tensor is not None and tensor.size == 1 and tensor.dtype == ir.DataType.FLOAT)


_MOST_BINS = 1024
"""Bins of the histogram that are evaluated; the finest are joined until there are no more."""


def range_behind(tensor: TensorStatistics, function: Function, grid: Grid) -> Range | None:
    """The range of `tensor` with the least expected squared error behind `function`; None where the function is not
    finite (a logarithm, a reciprocal) and the error is undefined.

    Args:
        grid: the integers that the range is mapped to.
    """
    low, high = min(tensor.minimum, 0.0), max(tensor.maximum, 0.0)
    if not tensor.count or low == high:
        return Range(0.0, 0.0)
    if grid.symmetric:
        high = max(-low, high)
        low = -high
    centres, counts = joined(*_bins(tensor))
    wanted = function(centres)
    if not np.isfinite(wanted).all():
        return None

    def errors(shares: Floats) -> Floats:
        """float[n]: the weighted squared error of each of n pairs of shares of the range's ends."""
        found = [_error(centres, counts, wanted, function, Range(low * a, high * b), grid) for a, b in shares]
        return np.array(found)

    one_side = np.ones(1)
    lows = COARSE if low < 0 and not grid.symmetric else one_side
    highs = COARSE if high > 0 else one_side
    pairs = np.array([(b if grid.symmetric else a, b) for a in lows for b in highs])
    best, least = _least(pairs, errors(pairs))
    for factor in REFINEMENTS:
        around = np.array([factor, 1.0, 1.0 / factor])
        a = np.minimum(best[0] * around, 1.0) if lows.size > 1 else one_side
        b = np.minimum(best[1] * around, 1.0) if highs.size > 1 else one_side
        pairs = np.array([(y if grid.symmetric else x, y) for x in a for y in b])
        candidate, error = _least(pairs, errors(pairs))
        if error < least:
            best, least = candidate, error
    if not np.isfinite(least):
        return None
    return Range(float(low * best[0]), float(high * best[1]))


def joined(centres: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Neighbouring bins joined until there are at most `_MOST_BINS`; centres are means weighted by count."""
    while len(centres) > _MOST_BINS:
        if len(centres) % 2:
            centres, counts = np.append(centres, centres[-1]), np.append(counts, 0.0)
        pairs, weights = centres.reshape(-1, 2), counts.reshape(-1, 2)
        counts = weights.sum(1)
        centres = np.where(counts > 0, (pairs * weights).sum(1) / np.maximum(counts, 1e-300), pairs.mean(1))
    return centres, counts


def _bins(tensor: TensorStatistics) -> tuple[Floats, Floats]:
    linear = linear_of(tensor.histogram)
    filled = linear.counts > 0
    return linear.centres()[filled], linear.counts[filled]


def _error(centres: Floats, counts: Floats, wanted: Floats, function: Function, chosen: Range, grid: Grid) -> float:
    """The summed squared error. The function is evaluated once for each integer, not for each bin."""
    params = grid.params(chosen.low, chosen.high)
    levels = params.dequantize(np.arange(params.low, params.high + 1))
    made = function(levels)[:, params.quantize(centres).astype(np.intp) - params.low]
    if not np.isfinite(made).all():
        return np.inf
    return float(((made - wanted) ** 2 @ counts).sum())


def _least(pairs: Floats, errors: Floats) -> tuple[Floats, float]:
    place = int(np.argmin(errors))
    return pairs[place], float(errors[place])
