"""Which gates to split, by simulation on values drawn from some samples.

Compared are the errors of x = y g(y) in integers as the model is and with y computed twice (`gates`), weighted by the
layers that read x. The range and the channel factors of the second y are chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeq.calibrate.range_method import Grid
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.sampled_values import channel_extrema, drawn_rows
from edgeq.calibrate.statistics import ChannelExtrema, Statistics
from edgeq.data.samples import Samples
from edgeq.model.prepare import PreparedModel
from edgeq.progress import Progress
from edgeq.tune.recover.elementwise import Follower, Followers, Function
from edgeq.tune.recover.gates import Gate
from edgeq.tune.recover.layers import Floats
from edgeq.tune.recover.nonlinear import range_behind
from edgeq.tune.recover.scaling import Weights

# Candidates for the ratio of the range of y' below zero to that above.
_BALANCES = (0.25, 0.5, 1.0, 2.0)
_SMALLEST = 1e-3


@dataclass(frozen=True, eq=False)
class Plan:
    """What splitting a gate would do.

    Attributes:
        now, then: expected squared error of x, weighted by its readers, over the expected square.
        factor: float64 [channels], k.
        value: range of y'.
    """

    gate: Gate
    now: float
    then: float
    factor: Floats
    value: Range


def plan_gates(
    prepared: PreparedModel,
    gates: Sequence[Gate],
    samples: Samples,
    statistics: Statistics,
    grid: Grid,
    progress: Progress,
) -> tuple[Plan, ...]:
    """Simulate each gate as it is and split, on values of y drawn from some samples.

    Args:
        gates: of the prepared model.
        statistics: of the prepared model.
        grid: the integers of activations.

    Raises:
        EdgeqError: ONNX Runtime refuses a sample.
    """
    # A Conv, or a Gemm of two axes: channels are the second axis.
    axes = {gate.layer.output: 1 for gate in gates}
    extrema = channel_extrema(prepared, axes, samples, progress)
    drawn = drawn_rows(prepared, axes, samples)
    followers = Followers(prepared.model)
    weights = Weights(prepared.model)
    plans = []
    for gate in gates:
        product = followers.function(gate.follower)
        head = Follower(gate.layer.output, gate.follower.nodes[:-1], (gate.gate,))
        opening = followers.function(head)
        weight = sum((weights.input_importance(r) for r in gate.readers), np.zeros(gate.layer.outputs))
        if not gate.readers:
            weight = np.ones(gate.layer.outputs)
        y = gate.layer.output
        now = range_behind(statistics.tensors[y], product, grid)
        if now is not None:
            plans.append(_simulate(gate, drawn[y], extrema[y], weight, opening, now, grid))
    return tuple(plans)


def worth_it(plans: Sequence[Plan], share: float) -> tuple[Plan, ...]:
    """The plans with the greatest gains, while a gain is more than `share` of the sum of errors that is left."""
    left = sum(plan.now for plan in plans)
    chosen = []
    for plan in sorted(plans, key=lambda p: p.then - p.now):
        gain = plan.now - plan.then
        if gain <= share * left:
            break
        chosen.append(plan)
        left -= gain
    return tuple(chosen)


def _simulate(
    gate: Gate, y: Floats, extrema: ChannelExtrema, weight: Floats, opening: Function, now: Range, grid: Grid
) -> Plan:
    g = opening(y).reshape(y.shape)
    x = y * g
    power = float(((x**2) @ weight).mean())
    span = Range(min(float(g.min()), 0.0), max(float(g.max()), 0.0))
    rounded_gate = _rounded(g, span, grid)
    product = _rounded(y, now, grid) * _rounded(opening(_rounded(y, now, grid)).reshape(y.shape), span, grid)
    error_now = float(((_rounded(product, _span(x), grid) - x) ** 2 @ weight).mean())
    above = np.maximum(extrema.maximum.astype(np.float64), 0.0)
    below = np.minimum(np.maximum(-extrema.minimum.astype(np.float64), 0.0), _closed_below(opening, extrema, span))
    best: Plan | None = None
    for balance in _BALANCES:
        factor = np.maximum(above, below / balance)
        factor = np.maximum(factor / max(float(factor.max()), 1e-30), _SMALLEST)
        if not gate.readers:
            factor = np.ones_like(factor)
        high = float((above / factor).max())
        low = float(min(balance * high if gate.readers else np.inf, (below / factor).max()))
        value = Range(-low, high)
        made = _rounded(y / factor, value, grid) * rounded_gate
        error = float((((_rounded(made, _span(x / factor), grid) * factor - x) ** 2) @ weight).mean())
        plan = Plan(gate, _over(error_now, power), _over(error, power), factor, value)
        if best is None or plan.then < best.then:
            best = plan
    assert best is not None
    return best


def _rounded(values: Floats, chosen: Range, grid: Grid) -> Floats:
    """Values quantized over a range and dequantized; zeros for an empty range."""
    params = grid.params(chosen.low, chosen.high)
    return np.asarray(params.fake_quant(values) if params.scale else np.zeros(values.shape), np.float64)


def _closed_below(opening: Function, extrema: ChannelExtrema, span: Range) -> float:
    """How far below zero y still matters: beyond that, g(y) is less than half a step of its own range."""
    lowest = float(extrema.minimum.min())
    if lowest >= 0:
        return 0.0
    numbers = np.linspace(lowest, 0.0, 4096)
    open_ = np.abs(opening(numbers).ravel()) >= 0.5 * (span.high - span.low) / 255
    return float(-numbers[open_].min()) if open_.any() else 0.0


def _span(values: Floats) -> Range:
    return Range(min(float(values.min()), 0.0), max(float(values.max()), 0.0))


def _over(error: float, power: float) -> float:
    return error / power if power > 0 else 0.0
