"""Convolutions in front of a gate, x = y g(y) as in SiLU and GELU, computed twice: once for each of its two readers.

In integers, y has one scale for both. The gate g wants y near zero, finely; the product wants all of y, and x then has
one scale for channels that may differ a hundredfold. No range serves both. But two convolutions cost little in
integers, and then each has its own scale:

    y  = W u + b          →  g(y)         its range is where g changes
    y' = (W u + b) / k    →  x' = y' g(y)     per channel k, so that all channels fill the range;
                                              who reads x' has its weights multiplied by k

In floats the network computes what it did. Which gates are worth it is decided by simulation on samples of y: the error
of x as it is now and as it would be, as the layers that read x weigh it, against the sum over all gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edgeq.calibrate.collect import collect
from edgeq.calibrate.mse import Grid
from edgeq.calibrate.observed import ObservedModel
from edgeq.calibrate.ranges import Range
from edgeq.calibrate.statistics import ChannelExtrema, Statistics
from edgeq.data.samples import Samples
from edgeq.model.load import load_model, model_digest, save_model
from edgeq.model.prepare import PreparedModel
from edgeq.progress import Progress
from edgeq.tune.recover.base import Stage, State
from edgeq.tune.recover.elementwise import Follower, Followers, Function
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.moments import spread
from edgeq.tune.recover.nonlinear import grid_of, range_behind
from edgeq.tune.recover.scaling import Weights, only_layers, readers_of

VALUE = "/value"
"""Behind the names of a layer's second form, its weights and its output."""

_SAMPLES, _POSITIONS = 16, 256
# How far the range of y' reaches below zero for each unit above it: what is tried.
_BALANCES = (0.25, 0.5, 1.0, 2.0)
_SMALLEST = 1e-3


@dataclass(frozen=True, eq=False)
class Gate:
    """A layer whose output is multiplied by a function of itself.

    Attributes:
        layer: gives y.
        product: the Mul that gives x.
        gate: the tensor g(y).
        follower: the nodes from y to x.
        readers: the layers that read x, if nothing else does; else empty, and then channels cannot be scaled.
    """

    layer: Layer
    product: onnx.NodeProto
    gate: str
    follower: Follower
    readers: tuple[Layer, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What splitting a gate would do.

    Attributes:
        now, then: expected squared error of x, as its readers weigh it, over the expected square.
        factor: float64 [channels], k.
        value: range of y'.
    """

    gate: Gate
    now: float
    then: float
    factor: Floats
    value: Range


@dataclass(frozen=True)
class SplitGates:
    """The recovery: gates are split while one causes at least `share` of the error of all gates.

    Every split costs a convolution.
    """

    name: str = "split-gates"
    title: str = "layers before x * g(x) computed twice, each with a range of its own and scaled channels"
    stage: Stage = "model"
    free: bool = False
    share: float = 0.1

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Raises:
        EdgeqError: the model refuses a sample.
        """
        source = state.prepared.path
        model = load_model(source, external_data="all")
        gates = [gate for gate in find_gates(model) if gate.layer.name not in state.scheme.exclude]
        if not gates:
            return state.note(f"{self.name}: no layer is followed by a product with a function of itself")
        grid = grid_of(state.scheme.activation_type, state.scheme.activation_symmetric)
        plans = plan_gates(model, source, gates, samples, state.statistics, grid, progress)
        chosen = worth_it(plans, self.share)
        if not chosen:
            return state.note(f"{self.name}: none of {len(gates)} gates stands out")
        split_all(model, chosen)
        path = workdir / "split.onnx"
        save_model(model, path)
        prepared = _as_prepared(state.prepared, path)
        ranges = {plan.gate.layer.output + VALUE: plan.value for plan in chosen}
        names = ", ".join(plan.gate.layer.name for plan in chosen)
        return state.replace(prepared=prepared, ranges={**state.ranges, **ranges}).note(
            f"{self.name}: {len(chosen)} of {len(gates)} gates split: {names}"
        )


def find_gates(model: onnx.ModelProto) -> tuple[Gate, ...]:
    """All gates of the main graph whose layer serves nothing else."""
    layers = {layer.name: layer for layer in find_layers(model)}
    by_output = {layer.output: layer for layer in layers.values()}
    followers = Followers(model)
    weights = Weights(model)
    found = []
    for node in model.graph.node:
        if node.op_type != "Mul" or len(node.input) != 2:
            continue
        for tensor, gate in (tuple(node.input), tuple(reversed(node.input))):
            layer = by_output.get(tensor)
            if layer is None or layer.op_type == "MatMul" or not weights.alone(layer.weight, layer.bias):
                continue
            follower = followers.of(tensor)
            inside = {made.output[0] for made in follower.nodes}
            if gate in inside and node.output[0] in inside:
                direct = [n for n in follower.nodes if tensor in n.input]
                until = _up_to(follower, node.output[0])
                if until is not None and all(n in until.nodes for n in direct):
                    found.append(Gate(layer, node, gate, until, _readers(model, node.output[0], layers, weights)))
                    break
    return tuple(found)


def plan_gates(
    model: onnx.ModelProto,
    source: Path,
    gates: Sequence[Gate],
    samples: Samples,
    statistics: Statistics,
    grid: Grid,
    progress: Progress,
) -> tuple[Plan, ...]:
    """Simulate each gate as it is and split, on values of y drawn from some samples.

    Args:
        model: with weights; `source` is its file.
        statistics: of `model`.
    """
    extrema = channel_extrema(source, [gate.layer for gate in gates], samples, progress)
    drawn = _draw(model, source, [gate.layer for gate in gates], samples)
    followers = Followers(model)
    weights = Weights(model)
    plans = []
    for gate in gates:
        product = followers.function(gate.follower)
        head = Follower(gate.layer.output, gate.follower.nodes[:-1], (gate.gate,))
        opening = followers.function(head)
        weight = sum((weights.input_importance(r) for r in gate.readers), np.zeros(gate.layer.outputs))
        if not gate.readers:
            weight = np.ones(gate.layer.outputs)
        now = range_behind(statistics.tensors[gate.layer.output], product, grid)
        plans.append(_simulate(gate, drawn[gate.layer.output], extrema[gate.layer.output], weight, opening, now, grid))
    return tuple(plans)


def worth_it(plans: Sequence[Plan], share: float) -> tuple[Plan, ...]:
    """The plans to carry out: the greatest gain first, while it is more than `share` of the error that is left."""
    left = sum(plan.now for plan in plans)
    chosen = []
    for plan in sorted(plans, key=lambda p: p.then - p.now):
        gain = plan.now - plan.then
        if gain <= share * left:
            break
        chosen.append(plan)
        left -= gain
    return tuple(chosen)


def split_all(model: onnx.ModelProto, plans: Sequence[Plan]) -> None:
    """Carry out plans, in place.

    In the order of the graph: a layer that reads what an earlier gate scales must be scaled before it is copied itself.
    """
    place = {node.name: index for index, node in enumerate(model.graph.node)}
    for plan in sorted(plans, key=lambda p: place[p.gate.layer.name]):
        _split(model, plan)


def _split(model: onnx.ModelProto, plan: Plan) -> None:
    """Carry out one plan. Nodes keep their names; the second form of the layer gets `VALUE` behind."""
    gate, layer = plan.gate, plan.gate.layer
    weights = Weights(model)
    nodes = list(model.graph.node)
    place = next(i for i, node in enumerate(nodes) if node.name == layer.name)
    weight, bias = weights.scaled_outputs(layer, 1 / plan.factor)
    second = onnx.NodeProto()
    second.CopyFrom(nodes[place])
    second.name = layer.name + VALUE
    second.output[0] = layer.output + VALUE
    second.input[1] = weights.add(layer.weight + VALUE, weight)
    if bias is not None:
        second.input[2] = weights.add(layer.bias + VALUE, bias)
    product = next(node for node in nodes if node.name == gate.product.name)
    position = list(product.input).index(layer.output)
    product.input[position] = second.output[0]
    model.graph.node.insert(place + 1, second)
    known = next((v for v in model.graph.value_info if v.name == layer.output), None)
    if known is not None:
        copy = model.graph.value_info.add()
        copy.CopyFrom(known)
        copy.name = second.output[0]
    for reader in gate.readers:
        weights.scale_inputs(reader, plan.factor)


def channel_extrema(
    source: Path, layers: Sequence[Layer], samples: Samples, progress: Progress
) -> Mapping[str, ChannelExtrema]:
    """Smallest and largest value of each output channel of `layers`, by output tensor."""
    names = list(dict.fromkeys(layer.output for layer in layers))
    axes = {layer.output: layer.channel_axis for layer in layers}
    axes = {name: axis if axis >= 0 else 1 for name, axis in axes.items()}
    statistics = collect(source, samples, names, channels=axes, progress=progress)
    found = {}
    for name, tensor in statistics.tensors.items():
        assert tensor.channels is not None, "extrema were asked for"
        found[name] = tensor.channels
    return found


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


def _closed_below(opening: Function, extrema: ChannelExtrema, span: Range) -> float:
    """How far below zero y still matters: beyond that, g(y) is less than half a step of its own range."""
    lowest = float(extrema.minimum.min())
    if lowest >= 0:
        return 0.0
    numbers = np.linspace(lowest, 0.0, 4096)
    open_ = np.abs(opening(numbers).ravel()) >= 0.5 * (span.high - span.low) / 255
    return float(-numbers[open_].min()) if open_.any() else 0.0


def _rounded(values: Floats, chosen: Range, grid: Grid) -> Floats:
    """Values quantized over a range and back, as ONNX's QuantizeLinear and DequantizeLinear do."""
    low, high = (-chosen.bound, chosen.bound) if grid.symmetric else (chosen.low, chosen.high)
    if high <= low:
        return np.zeros_like(values)
    scale = (high - low) / (grid.most - grid.least)
    middle = np.rint((grid.least + grid.most) / 2)
    zero = middle if grid.symmetric else np.clip(np.rint(grid.least - low / scale), grid.least, grid.most)
    return np.asarray((np.clip(np.rint(values / scale) + zero, grid.least, grid.most) - zero) * scale, np.float64)


def _span(values: Floats) -> Range:
    return Range(min(float(values.min()), 0.0), max(float(values.max()), 0.0))


def _over(error: float, power: float) -> float:
    return error / power if power > 0 else 0.0


def _draw(model: onnx.ModelProto, source: Path, layers: Sequence[Layer], samples: Samples) -> Mapping[str, Floats]:
    """Output tensor → float64 [values, channels], from some positions of some samples."""
    names = list(dict.fromkeys(layer.output for layer in layers))
    axes = {layer.output: layer.channel_axis for layer in layers}
    observed = ObservedModel(model, source, names, keep_layout=names)
    drawn: dict[str, list[Floats]] = {name: [] for name in names}
    for number, sample in enumerate(spread(samples, _SAMPLES)):
        random = np.random.default_rng(number)
        for name, value in zip(names, observed.run(sample.inputs, sample.name), strict=True):
            table = np.moveaxis(value, axes[name], -1).reshape(-1, value.shape[axes[name]])
            places = random.choice(len(table), min(len(table), _POSITIONS), replace=False)
            drawn[name].append(table[places].astype(np.float64))
    return {name: np.concatenate(parts) for name, parts in drawn.items()}


def _up_to(follower: Follower, end: str) -> Follower | None:
    """The part of a follower that `end` depends on, if nothing in it is read elsewhere but `end`."""
    makers = {node.output[0]: node for node in follower.nodes}
    needed: set[str] = set()
    waiting = [end]
    while waiting:
        name = waiting.pop()
        if name in makers and name not in needed:
            needed.add(name)
            waiting.extend(makers[name].input)
    nodes = tuple(node for node in follower.nodes if node.output[0] in needed)
    outside = [node for node in follower.nodes if node.output[0] not in needed]
    read_outside = {name for node in outside for name in node.input} | set(follower.ends)
    if (needed - {end} | {follower.tensor}) & read_outside:
        return None
    return Follower(follower.tensor, nodes, (end,))


def _readers(model: onnx.ModelProto, tensor: str, layers: dict[str, Layer], weights: Weights) -> tuple[Layer, ...]:
    if tensor in {output.name for output in model.graph.output}:
        return ()
    found = only_layers(readers_of(model, tensor), tensor, layers) or []
    return tuple(found) if all(weights.alone(layer.weight) for layer in found) else ()


def _as_prepared(before: PreparedModel, path: Path) -> PreparedModel:
    return PreparedModel(path, before.source, model_digest(path), before.signature, before.opset, before.notes)
