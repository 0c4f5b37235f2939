"""Bias correction in context: each layer's mean error, channel by channel, taken off where it arises.

Rounding and clipping shift the mean of what a layer gives, and the shifts add up from layer to layer. In the order of
the graph, each layer of the quantized model is fed what the corrected layers before it give; the mean difference from
the float model goes into its int32 bias (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and
Bias Correction", section 4.2, with data instead of their assumptions). All layers at once would correct what earlier
corrections have corrected already, and diverge.

What counts is the mean behind the activation function f that follows: most of what stands in front of a SiLU or of a
detector's score may be far below zero, where an error means nothing, and its mean would drown what matters. With y the
float output, z the quantized model's, both cut to the range that is left of them, the bias d is one Newton step:

    d = (mean f(y) - mean f(z)) / mean f'(z)

A mean over few samples is uncertain. With v the variance of d over samples, over their number, d (1 - v / d^2), where
positive, is what is corrected: noise is left alone (positive-part shrinkage of James and Stein).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.data.samples import Sample, Samples
from edgeq.graph.convert import from_proto
from edgeq.model.load import load_model
from edgeq.progress import Progress
from edgeq.tune.recover.artifact import IntegerLayer, QuantizedFile
from edgeq.tune.recover.base import Recovery, Stage, State
from edgeq.tune.recover.elementwise import Followers, Function
from edgeq.tune.recover.expand import expanded
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.moments import spread
from edgeq.tune.recover.stepper import Stepper

SAMPLES = 32
MEMORY = 2**29
"""Bytes that the activations of all samples may take at once; fewer samples are used where they would take more."""
# Tensors of the largest size that are alive at once, on both sides of a branch and of Q/DQ nodes.
_ALIVE = 4
# Positions of a sample that are looked at.
_POSITIONS = 4096
# Slopes of the activation below this are taken for none: such a channel is shut, and its bias means nothing.
_FLAT = 0.02


@dataclass(frozen=True)
class BiasCorrection(Recovery):
    """The recovery. The nodes stay as they are."""

    name: str = "bias-correction"
    title: str = "mean error of each layer's output taken off in its bias"
    stage: Stage = "artifact"
    free: bool = True
    order = 80

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Raises:
        EdgeqError: a model refuses a sample.
        """
        assert state.artifact is not None
        source = state.prepared.path
        graph = load_model(source, external_data="none")
        file = QuantizedFile.read(state.artifact.model)
        integers = [found for found in file.integer_layers(find_layers(graph)) if found.bias and not found.shared]
        if not integers:
            return state.note(f"{self.name}: no layer has an int32 bias of its own")
        shifts = correct(graph, source, file, integers, list(spread(samples, SAMPLES)), progress)
        path = workdir / state.artifact.model.name
        file.save(path)
        done = sum(bool(np.any(shift)) for shift in shifts.values())
        return state.replace(artifact=replace(state.artifact, model=path)).note(
            f"{self.name}: the means of {done} of {len(integers)} layers corrected"
        )


def correct(
    graph: onnx.ModelProto,
    source: Path,
    file: QuantizedFile,
    integers: Sequence[IntegerLayer],
    samples: Sequence[Sample],
    progress: Progress,
) -> dict[str, Floats]:
    """Correct the biases of `integers` in `file`, in the order of the graph.

    Args:
        graph: the float model at `source`; its larger weights need not be loaded.
        samples: how many are used is bounded by `MEMORY`.

    Returns:
        What was added to each layer's bias, float64 [outputs], by the layer's name.
    """
    followers = Followers(graph)
    looks = {
        i.layer.name: _Look(i.layer, followers.function(followers.of(i.layer.output)), file.output_range(i))
        for i in integers
    }
    wanted, largest = _float_means(graph, source, looks, samples)
    count = int(np.clip(MEMORY // (_ALIVE * largest), 1, len(samples)))
    nodes, extra = expanded(file.model)
    made = {node.name: node.output[0] for node in nodes}
    place = {node.name: index for index, node in enumerate(nodes)}
    steps = Stepper(file.model, [sample.inputs for sample in samples[:count]], nodes=nodes, extra=extra)
    shifts: dict[str, Floats] = {}
    with progress.stage("correcting biases", len(integers)) as advance:
        for integer in sorted(integers, key=lambda i: place[i.node]):
            layer, tensor = integer.layer, made[integer.node]
            values = steps.advance(tensor)
            added = file.add_to_bias(integer, shift_of(looks[layer.name], wanted[layer.name][:count], values))
            shape = [1, -1] + [1] * (len(layer.shape) - 2) if layer.op_type == "Conv" else [-1]
            steps.add(tensor, added.astype(np.float32).reshape(shape))
            shifts[layer.name] = added
            advance(1)
    return shifts


@dataclass(frozen=True, eq=False)
class _Look:
    """How the output of a layer is looked at: some positions, cut to its integer range, behind its activation."""

    layer: Layer
    function: Function
    limits: tuple[float, float]

    def table(self, value: NDArray[Any]) -> NDArray[np.float32]:
        """Some positions, the same in every tensor of this shape: float32 [positions, channels]."""
        axis = self.layer.channel_axis % value.ndim
        table = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
        if len(table) > _POSITIONS:
            # At random, since every so-many-th position may be one column of the image.
            table = table[np.random.default_rng(0).integers(0, len(table), _POSITIONS)]
        low, high = (np.float32(limit) for limit in self.limits)
        return np.asarray(np.clip(table, low, high), np.float32)

    def means(self, table: NDArray[np.float32]) -> Floats:
        """float64 [ends, channels]: the mean behind the activation."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.function(table).reshape(-1, *table.shape).mean(1), np.float64)


def shift_of(look: _Look, wanted: Floats, values: Sequence[NDArray[Any]]) -> Floats:
    """The bias to add, float64 [channels]; 0 where what follows is not finite (a logarithm, a reciprocal).

    Args:
        wanted: the float model's means, float64 [samples, ends, channels].
        values: the quantized model's output for each sample.
    """
    differences, slopes = [], []
    for target, value in zip(wanted, values, strict=True):
        table = look.table(value)
        step = np.float32(max(1e-3, 1e-2 * float(np.abs(table).mean())))
        with np.errstate(invalid="ignore"):
            differences.append(target - look.means(table))
            slopes.append((look.means(table + step) - look.means(table - step)) / (2 * float(step)))
    difference, slope = np.stack(differences), np.mean(slopes, axis=0)
    usable = np.isfinite(difference).all((0, 1)) & np.isfinite(slope).all(0)
    difference, slope = (np.where(usable, values, 0.0) for values in (difference, slope))
    steps = (difference * slope).sum(1) / np.maximum((slope**2).sum(0), _FLAT**2)
    return shrunk(np.where((slope**2).sum(0) > _FLAT**2, steps, 0.0))


def shrunk(differences: Floats) -> Floats:
    """The mean of differences [samples, channels] over samples, less what may be chance."""
    count = len(differences)
    mean = differences.mean(0)
    if count < 2:
        return np.asarray(mean, np.float64)
    variance = differences.var(0, ddof=1) / count
    sure = np.maximum(0.0, 1.0 - variance / np.maximum(mean**2, np.finfo(np.float64).tiny))
    return np.asarray(mean * sure, np.float64)


def _float_means(
    graph: onnx.ModelProto, source: Path, looks: Mapping[str, _Look], samples: Sequence[Sample]
) -> tuple[Mapping[str, Floats], int]:
    """(means [samples, ends, channels] of each layer in the float model, bytes of the largest output)."""
    names = [look.layer.output for look in looks.values()]
    model = InstrumentedModel(from_proto(graph, source.parent), names, keep_layout=names)
    collected: dict[str, list[Floats]] = {name: [] for name in looks}
    largest = 1
    for sample in samples:
        for look, value in zip(looks.values(), model.run(sample.inputs, sample.name), strict=True):
            collected[look.layer.name].append(look.means(look.table(value)))
            largest = max(largest, value.nbytes)
    return {name: np.stack(rows) for name, rows in collected.items()}, largest


RECOVERY = BiasCorrection()
