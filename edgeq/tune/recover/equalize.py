"""Cross-layer equalization: channels of an activation scaled up to fill the range that they share.

An activation has one scale, its channels differ: one that reaches 0.1 where another reaches 6 is left with four of 255
integers. Where a layer makes the tensor and only layers read it, channel c can be multiplied by k[c] in the first one's
weights and divided by it in the others' (Nagel et al., "Data-free quantization through weight equalization and bias
correction", 2019, equalizes weights so; here weights mostly have a scale per channel and activations gain). Between
them may lie what keeps a positive factor a factor: ReLU, pooling, and a Clip from 0, as long as no scaled channel
reaches its bound.

    k[c] = (range of the tensor / range of channel c)^a

a = 1 makes the most of the activation; but weights that read several channels have one scale for all of them, and are
squeezed by it. So a is chosen, tensor by tensor, for the least sum of both errors:

    activation  sum over c  w[c]² step² / 12 / k[c]²
    weights     sum over m  step[m]² / 12  sum over taps of E[x²] k²
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from edgeq.calibrate.histogram import Histogram
from edgeq.calibrate.statistics import ChannelExtrema, Statistics
from edgeq.data.samples import Samples
from edgeq.model.load import load_model, model_digest, save_model
from edgeq.progress import Progress
from edgeq.tune.recover.base import Stage, State
from edgeq.tune.recover.drawn import channel_extrema
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.scaling import Weights, only_layers, spread_over_taps
from edgeq.tune.recover.uses import readers, uses

_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST = 1000.0
_LEVELS, _WEIGHT_LEVELS = 255.0, 127.0


@dataclass(frozen=True)
class Chain:
    """A tensor whose channels may be scaled.

    Attributes:
        producer: its output is the tensor, before the nodes between.
        readers: the layers that read it, behind them.
        tensor: what the readers read.
        clip: the upper bound of a Clip in between; infinity without.
        rectified: whether nothing below zero gets through.
    """

    producer: Layer
    readers: tuple[Layer, ...]
    tensor: str
    clip: float
    rectified: bool


@dataclass(frozen=True)
class Equalize:
    """The recovery."""

    name: str = "equalize"
    title: str = "channels of activations scaled to fill their common range"
    stage: Stage = "model"
    free: bool = True

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Raises:
        EdgeqError: the model refuses a sample.
        """
        source = state.prepared.path
        model = load_model(source, external_data="all")
        kept = set(state.scheme.exclude)
        chains = [c for c in find_chains(model) if not kept.issuperset(reader.name for reader in c.readers)]
        if not chains:
            return state.note(f"{self.name}: no activation lies between layers alone")
        extrema = channel_extrema(source, [chain.producer for chain in chains], samples, progress)
        weights = Weights(model)
        changed = 0
        factors = {c.tensor: factors_of(c, extrema[c.producer.output], weights, state.statistics) for c in chains}
        for chain in chains:
            factor = factors[chain.tensor]
            if (factor > 1).any():
                changed += 1
                weight, bias = weights.scaled_outputs(chain.producer, factor)
                weights.replace(chain.producer.weight, weight)
                if bias is not None:
                    weights.replace(chain.producer.bias, bias)
                for reader in chain.readers:
                    weights.scale_inputs(reader, 1 / factor)
        if not changed:
            return state.note(f"{self.name}: channels fill their ranges as they are")
        path = workdir / "equalized.onnx"
        save_model(model, path)
        prepared = replace(state.prepared, path=path, digest=model_digest(path))
        return state.replace(prepared=prepared).note(f"{self.name}: channels of {changed} activations scaled")


def find_chains(model: onnx.ModelProto) -> Iterator[Chain]:
    """All tensors of the main graph between one layer and layers alone, whose weights nobody else uses."""
    layers = {layer.name: layer for layer in find_layers(model)}
    weights = Weights(model)
    read, used = readers(model), uses(model)
    constants = {t.name: t for t in model.graph.initializer}
    for producer in layers.values():
        if producer.op_type == "MatMul" or not weights.alone(producer.weight, producer.bias):
            continue
        tensor, clip, rectified = producer.output, float("inf"), False
        while (nodes := read.get(tensor)) and used[tensor] == len(nodes):
            found = only_layers(nodes, tensor, layers)
            if found is not None:
                if all(weights.alone(reader.weight) for reader in found):
                    yield Chain(producer, tuple(found), tensor, clip, rectified)
                break
            bound = _bound(nodes[0], constants) if len(nodes) == 1 else None
            if bound is None:
                break
            clip, rectified = min(clip, bound), rectified or nodes[0].op_type in ("Relu", "Clip")
            tensor = nodes[0].output[0]


def factors_of(chain: Chain, extrema: ChannelExtrema, weights: Weights, statistics: Statistics) -> Floats:
    """k for each channel of a chain's tensor, float64 [channels], none below 1.

    Args:
        extrema: of the producer's output.
        statistics: of the model, for E[x²].
    """
    above = np.minimum(np.maximum(extrema.maximum.astype(np.float64), 0.0), chain.clip)
    below = np.maximum(-extrema.minimum.astype(np.float64), 0.0)
    if chain.rectified:
        below = np.zeros_like(below)
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.fmin(above.max() / above, below.max() / below)
    room = np.clip(np.nan_to_num(room, nan=1.0, posinf=1.0), 1.0, _MOST)
    reach = np.maximum(above, below)
    power = reach**2 * (_mean_square(statistics.tensors[chain.tensor].histogram) / max(float((reach**2).mean()), 1e-30))
    step = (above.max() + below.max()) / _LEVELS

    def error(exponent: float) -> float:
        factor = room**exponent
        return sum(_error(reader, weights, factor, power, step) for reader in chain.readers)

    return np.asarray(room ** min(_EXPONENTS, key=error), np.float64)


def _error(reader: Layer, weights: Weights, factor: Floats, power: Floats, step: float) -> float:
    """Expected squared error of a reader's outputs, summed, where channels of its input are scaled by `factor`."""
    rows = reader.rows(weights.array(reader.weight).astype(np.float64)) * spread_over_taps(reader, 1 / factor)
    scaled = spread_over_taps(reader, power * factor**2)
    activation = float((rows**2).sum()) * step**2 / 12
    steps = np.abs(rows).max(2) / _WEIGHT_LEVELS
    return activation + float((steps**2 * scaled.sum(2)).sum()) / 12


def _mean_square(histogram: Histogram) -> float:
    lower, upper = histogram.edges()
    return float(np.average(((lower + upper) / 2) ** 2, weights=histogram.counts)) if histogram.total else 0.0


def _bound(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> float | None:
    """Up to where a node gives k f(x) for k x, k > 0: infinity, a Clip's bound, or None for no such node."""
    if node.domain or len(node.output) != 1:
        return None
    if node.op_type in _HOMOGENEOUS:
        return float("inf")
    if node.op_type != "Clip" or not node.input[1:] or not node.input[1]:
        return None
    low, high = (_scalar(constants, name) for name in (*node.input[1:3], "")[:2])
    if low != 0.0:
        return None
    return float("inf") if len(node.input) < 3 or not node.input[2] else high


def _scalar(constants: Mapping[str, onnx.TensorProto], name: str) -> float | None:
    return float(numpy_helper.to_array(constants[name]).item()) if name in constants else None
