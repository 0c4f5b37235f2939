"""Split convolutions before a gate x = y g(y), as in SiLU and GELU: compute the convolution twice, once for each of the
two readers of its output y.

In integers, y has one scale for both readers. The gate g needs small steps near zero. The product needs the whole range
of y, and x then has one scale for channels that may differ a hundredfold. No range serves both. Two convolutions cost
little in integers, and then each result has its own scale:

    y  = W u + b          →  g(y)         its range is where g changes
    y' = (W u + b) / k    →  x' = y' g(y)     per channel k, so that all channels fill the range;
                                              the layers that read x' have their weights multiplied by k

In floats the network computes the same.

`find_gates` finds these convolutions. `plan_gates` computes the errors of x = y g(y) in integers with and without the
split, for values of y drawn from some samples. The errors are weighted by the layers that read x. It also chooses the
range and the channel factors of the second y. `select_splits` compares the gains to the errors of all gates, and
`split_gates` splits the gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibration.channel_values import DRAWN_SAMPLES, ChannelValues, observe_channels
from edgeq.calibration.ranges import Range
from edgeq.calibration.rescaled import RescaledTensor
from edgeq.calibration.statistics import Statistics
from edgeq.data.samples import Samples, spread_over
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex, is_op, name_of, readers
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.model.quant_params import Grid, grid_of
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.followers import Follower, Followers, Function
from edgeq.tuning.recover.layers import Floats, WeightedLayer, Weights, find_layers, only_layers
from edgeq.tuning.recover.nonlinear import find_range_before
from edgeq.util.display import Progress

MIN_SHARE = 0.02
"""Smallest gain that is worth a split, as a share of the errors of all gates."""
VALUE = "/value"
"""Suffix of the names of a layer's second form, of its weights and of its output."""


@dataclass(frozen=True, eq=False)
class Gate:
    """Describe a layer whose output is multiplied by a function of itself.

    Attributes:
        layer: the layer that computes y.
        product: name of the Mul that computes x.
        gate: name of the tensor g(y).
        follower: the nodes from y to x.
        readers: the layers that read x. If anything else reads x, this is empty, and channels cannot be scaled.
    """

    layer: WeightedLayer
    product: str
    gate: str
    follower: Follower
    readers: tuple[WeightedLayer, ...]

    @property
    def output(self) -> str:
        """Return the name of x, which is the only end of the follower."""
        return self.follower.ends[0]


def find_gates(model: ir.Model) -> tuple[Gate, ...]:
    """Return every gate in the main graph that is the only user of its layer's output."""
    layers = {layer.name: layer for layer in find_layers(model)}
    by_output = {layer.output: layer for layer in layers.values()}
    followers, weights = Followers(model), Weights(model)
    gates = []
    for node in model.graph:
        if not is_op(node, "Mul"):
            continue
        for value, gate in (tuple(node.inputs), tuple(reversed(node.inputs))):
            layer = by_output.get(name_of(value))
            # A MatMul has no bias, and its channels are not on the second axis, which the plan relies on.
            if layer is None or layer.op_type == "MatMul" or not weights.are_read_once(layer.weight, layer.bias):
                continue
            follower = _cut_follower(followers.find(layer.output), node)
            inside = {output for inner in follower.nodes for output in inner.outputs} if follower else ()
            if follower is not None and gate in inside:
                reading = _find_readers(node.outputs[0], layer, layers, weights)
                gates.append(Gate(layer, node.name or "", name_of(gate), follower, reading))
                break
    return tuple(gates)


def split_gates(model: ir.Model, factors: Sequence[tuple[Gate, Floats]]) -> None:
    """Split gates of `model`, in place.

    Gates are split in the order of the graph. If a layer reads the output of an earlier gate, its weights must be
    scaled before the layer is copied.

    Args:
        factors: the gates to split, each with its k, float64 [channels]. These gates may also belong to the model from
            which `model` was cloned.
    """
    index = GraphIndex(model)
    editor = Editor(model)
    for gate, factor in sorted(factors, key=lambda pair: index.order[pair[0].layer.name]):
        _split(editor, index, gate, factor)


def _split(editor: Editor, index: GraphIndex, gate: Gate, factor: Floats) -> None:
    """Split one gate. Nodes keep their names. The second form of the layer gets the layer's name with the suffix
    `VALUE`.
    """
    layer, original = gate.layer, index.nodes[gate.layer.name]
    weights = Weights(editor.model)
    weight, bias = weights.scaled_outputs(layer, 1 / factor)
    inputs = [original.inputs[0], editor.constant(layer.weight + VALUE, weight.astype("float32"))]
    if bias is not None:
        inputs.append(editor.constant(layer.bias + VALUE, bias.astype("float32")))
    output = original.outputs[0]
    second = editor.node(
        layer.op_type,
        inputs,
        layer.name + VALUE,
        output=layer.output + VALUE,
        after=original,
        like=output,
        attributes=original.attributes,
        domain=original.domain,
    )
    # Only the product reads the second form. The gate keeps the first, whose range suits it.
    product = index.nodes[gate.product]
    product.replace_input_with(product.inputs.index(output), second)
    for reader in gate.readers:
        weights.scale_inputs(reader, factor)


def _cut_follower(follower: Follower, end: ir.Node) -> Follower | None:
    """Return the part of a follower on which the output of `end` depends.

    Return None if `end` is not in the follower, or if anything outside that part reads one of its inner tensors.
    """
    inside = set(follower.nodes)
    ancestors: set[ir.Node] = set()
    waiting: list[ir.Node | None] = [end]
    while waiting:
        node = waiting.pop()
        if node in inside and node not in ancestors:
            ancestors.add(node)
            waiting.extend(value.producer() for value in node.inputs if value is not None)
    if end not in ancestors:
        return None
    read_outside = {name_of(value) for node in inside - ancestors for value in node.inputs} | set(follower.ends)
    inner = {name_of(node.outputs[0]) for node in ancestors - {end}} | {follower.tensor}
    # A tensor that something else reads must keep its values, so the gate cannot be cut out.
    if inner & read_outside:
        return None
    return Follower(follower.tensor, tuple(n for n in follower.nodes if n in ancestors), (name_of(end.outputs[0]),))


def _find_readers(
    value: ir.Value, maker: WeightedLayer, layers: Mapping[str, WeightedLayer], weights: Weights
) -> tuple[WeightedLayer, ...]:
    if value.is_graph_output():
        return ()
    matches = only_layers(readers(value), name_of(value), maker, layers)
    return matches if all(weights.are_read_once(layer.weight) for layer in matches) else ()


# Candidates for the ratio of the range of y' below zero to its range above zero.
# The gate is nearly closed below zero, so it may pay to give that side fewer or more of the steps.
_BALANCES = (0.25, 0.5, 1.0, 2.0)
# A channel of zeros would have the factor 0, and dividing by it would make its weights infinite.
_SMALLEST = 1e-3


@dataclass(frozen=True, eq=False)
class GateSplit:
    """Describe the effect of splitting a gate.

    Attributes:
        error_before, error_after: expected squared error of x before and after the split, weighted by its readers,
            divided by the expected square of x.
        factor: k, float64 [channels].
        value: range of y'.
    """

    gate: Gate
    error_before: float
    error_after: float
    factor: Floats
    value: Range


def plan_gates(
    prepared: PreparedModel,
    gates: Sequence[Gate],
    values: Mapping[str, ChannelValues],
    statistics: Statistics,
    grid: Grid,
) -> tuple[GateSplit, ...]:
    """Simulate each gate with and without the split, on drawn values of y.

    Args:
        gates: gates of the prepared model.
        values: the values of each gate's y, by its name.
        statistics: statistics of the prepared model.
        grid: the integers of activations.
    """
    followers = Followers(prepared.model)
    weights = Weights(prepared.model)
    plans = []
    for gate in gates:
        product = followers.function(gate.follower)
        head = Follower(gate.layer.output, gate.follower.nodes[:-1], (gate.gate,))
        opening = followers.function(head)
        # An error counts as much as the layers that read it amplify it.
        weight = sum((weights.input_importance(r) for r in gate.readers), np.zeros(gate.layer.outputs))
        if not gate.readers:
            weight = np.ones(gate.layer.outputs)
        y = gate.layer.output
        now = find_range_before(statistics.tensors[y], product, grid)
        if now is not None:
            plans.append(_simulate(gate, values[y], weight, opening, now, grid))
    return tuple(plans)


def select_splits(plans: Sequence[GateSplit], share: float = MIN_SHARE) -> tuple[GateSplit, ...]:
    """Return the plans with the greatest gains. Each gain is more than `share` of the errors of all gates that remain
    before that split.
    """
    remaining = sum(plan.error_before for plan in plans)
    worthwhile = []
    # The largest gain first, so that the loop may end at the first gain that is too small.
    for plan in sorted(plans, key=lambda p: p.error_after - p.error_before):
        gain = plan.error_before - plan.error_after
        if gain <= share * remaining:
            break
        worthwhile.append(plan)
        remaining -= gain
    return tuple(worthwhile)


def _simulate(
    gate: Gate, values: ChannelValues, weight: Floats, opening: Function, now: Range, grid: Grid
) -> GateSplit:
    y = values.rows.astype(np.float64)
    g = opening(y).reshape(y.shape)
    x = y * g
    power = float(((x**2) @ weight).mean())
    span = Range(min(float(g.min()), 0.0), max(float(g.max()), 0.0))
    rounded_gate = _round_values(g, span, grid)
    product = _round_values(y, now, grid) * _round_values(
        opening(_round_values(y, now, grid)).reshape(y.shape), span, grid
    )
    error_now = float(((_round_values(product, _range_of(x), grid) - x) ** 2 @ weight).mean())
    lowest, highest = values.minimum.astype(np.float64), values.maximum.astype(np.float64)
    above = np.maximum(highest, 0.0)
    below = np.minimum(np.maximum(-lowest, 0.0), _find_closed_below(opening, float(lowest.min()), span))
    best: GateSplit | None = None
    for balance in _BALANCES:
        factor = np.maximum(above, below / balance)
        factor = np.maximum(factor / max(float(factor.max()), 1e-30), _SMALLEST)
        if not gate.readers:
            factor = np.ones_like(factor)
        high = float((above / factor).max())
        low = float(min(balance * high if gate.readers else np.inf, (below / factor).max()))
        value = Range(-low, high)
        split_product = _round_values(y / factor, value, grid) * rounded_gate
        error = float((((_round_values(split_product, _range_of(x / factor), grid) * factor - x) ** 2) @ weight).mean())
        plan = GateSplit(gate, _relative(error_now, power), _relative(error, power), factor, value)
        if best is None or plan.error_after < best.error_after:
            best = plan
    assert best is not None
    return best


def _round_values(values: Floats, span: Range, grid: Grid) -> Floats:
    """Return values after quantization over a range and dequantization; zeros for an empty range."""
    params = grid.params(span.low, span.high)
    return np.asarray(params.fake_quant(values) if params.scale else np.zeros(values.shape), np.float64)


def _find_closed_below(opening: Function, lowest: float, span: Range) -> float:
    """Return how far below zero y still matters, if its smallest value is `lowest`. Farther below, g(y) is less than
    half a step of its own range.
    """
    if lowest >= 0:
        return 0.0
    numbers = np.linspace(lowest, 0.0, 4096)
    open_ = np.abs(opening(numbers).ravel()) >= 0.5 * (span.high - span.low) / 255
    return float(-numbers[open_].min()) if open_.any() else 0.0


def _range_of(values: Floats) -> Range:
    return Range(min(float(values.min()), 0.0), max(float(values.max()), 0.0))


def _relative(error: float, power: float) -> float:
    return error / power if power > 0 else 0.0


@dataclass(frozen=True)
class SplitGates(Recovery):
    """Split the gates whose errors are worth a second convolution (`select_splits`)."""

    name: str = "split-gates"
    title: str = "layers before x * g(x) computed twice, each with a range of its own and scaled channels"
    stage: Stage = "model"
    free: bool = False
    order = 30

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Split the gates of `state`.

        Raises:
            EdgeqError: the model refuses a sample.
        """
        gates = [gate for gate in find_gates(state.prepared.model) if gate.layer.name not in state.scheme.exclude]
        if not gates:
            return state.note(f"{self.name}: no layer is followed by a product with a function of itself")
        assert state.statistics is not None
        grid = grid_of(state.scheme.activation_type, state.scheme.activation_symmetric, state.scheme.scale)
        # The layers are Conv, or Gemm with two axes, so channels are the second axis.
        axes = {gate.layer.output: 1 for gate in gates}
        few = observe_channels(state.prepared, axes, spread_over(samples, DRAWN_SAMPLES), progress)
        selection = select_splits(plan_gates(state.prepared, gates, few, state.statistics, grid))
        # Some samples show which gates to split. Factors and ranges need the extrema over all samples, of these gates.
        noisy = [plan.gate for plan in selection]
        axes = {name: 1 for gate in noisy for name in (gate.layer.output, gate.output)}
        values = observe_channels(state.prepared, axes, samples, progress) if noisy else {}
        splits = select_splits(plan_gates(state.prepared, noisy, values, state.statistics, grid), 0.0)
        if not splits:
            return state.note(f"{self.name}: none of {len(gates)} gates stands out")
        model = state.prepared.model.clone()
        split_gates(model, [(plan.gate, plan.factor) for plan in splits])
        prepared = save_rewritten(state.prepared, model, workdir / "split.onnx")
        ranges = {plan.gate.layer.output + VALUE: plan.value for plan in splits}
        # The second y is y / k, and x becomes x / k.
        rescaled = {
            new: RescaledTensor(old, values[old], plan.factor)
            for plan in splits
            for y, x in [(plan.gate.layer.output, plan.gate.output)]
            for new, old in ((y + VALUE, y), (x, x))
        }
        names = ", ".join(plan.gate.layer.name for plan in splits)
        changed = {plan.gate.layer.name for plan in splits}
        return state.replace(
            prepared=prepared,
            ranges={**state.ranges, **ranges},
            changed=state.changed | changed,
            rescaled=rescaled,
        ).note(f"{self.name}: {len(splits)} of {len(gates)} gates split: {names}")


RECOVERY = SplitGates()
