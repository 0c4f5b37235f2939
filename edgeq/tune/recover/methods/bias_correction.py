"""Bias correction in context: each layer's mean error, channel by channel, subtracted where it arises.

Rounding and clipping shift the mean of a layer's output, and the shifts add up from layer to layer. In the order of the
graph, each layer of the quantized model is fed the outputs of the corrected layers before it; the mean difference from
the float model goes into its int32 bias (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and
Bias Correction", section 4.2, with data instead of their assumptions). All layers at once would correct what earlier
corrections have corrected already, and diverge.

What counts is the mean behind the activation function f that follows: most values before a SiLU or before a detector's
score may be far below zero, where errors have no effect, and would dominate the mean. With y the float output, z the
quantized model's, both clipped to the range of its integers, the bias d is one Newton step:

    d = (mean f(y) - mean f(z)) / mean f'(z)

A mean over few samples is uncertain. With v the variance of d over samples, over their number, d (1 - v / d^2), where
positive, is corrected: noise is left alone (positive-part shrinkage of James and Stein).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.sampled_values import spread
from edgeq.data.records import Sample
from edgeq.data.samples import Samples
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.prepare import PreparedModel
from edgeq.tune.recover.artifact import PLAIN, IntegerLayer, QuantizedFile, expanded
from edgeq.tune.recover.base import Recovery, Stage, State
from edgeq.tune.recover.layers import Floats, find_layers
from edgeq.tune.recover.moments import OutputView, float_means
from edgeq.tune.recover.nonlinear import Followers
from edgeq.tune.recover.stepper import Stepper
from edgeq.util.display import Progress

SAMPLES = 32
MEMORY = 2**29
"""Bytes that the activations of all samples may take at once; fewer samples are used where they would take more."""
# Tensors of the largest size that are alive at once, on both sides of a branch and of Q/DQ nodes.
_ALIVE = 4
# Slopes of the activation function below this count as zero: the bias of such a channel has no effect.
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
        file = QuantizedFile.read(state.artifact.model)
        layers = find_layers(state.prepared.model)
        integers = [i for i in file.integer_layers(layers) if i.bias is not None and not i.shared]
        if not integers:
            return state.note(f"{self.name}: no layer has an int32 bias of its own")
        taken = list(spread(samples, SAMPLES))
        shifts = correct(state.prepared, file, integers, taken, progress, store=workdir.parent)
        path = workdir / state.artifact.model.name
        file.save(path)
        done = sum(bool(np.any(shift)) for shift in shifts.values())
        return state.replace(artifact=replace(state.artifact, model=path)).note(
            f"{self.name}: the means of {done} of {len(integers)} layers corrected"
        )


def correct(
    prepared: PreparedModel,
    file: QuantizedFile,
    integers: Sequence[IntegerLayer],
    samples: Sequence[Sample],
    progress: Progress,
    *,
    store: Path | None = None,
) -> dict[str, Floats]:
    """Correct the biases of `integers` in `file`, in the order of the graph.

    Args:
        prepared: the float model.
        samples: how many are used is bounded by `MEMORY`.
        store: as `float_means` has it.

    Returns:
        The change of each layer's bias, float64 [outputs], by the layer's name.

    Raises:
        EdgeqError: a model refuses a sample.
    """
    followers = Followers(prepared.model)
    views = {
        i.layer.name: OutputView(
            i.layer, followers.function(followers.of(i.layer.output), np.float32), file.output_range(i)
        )
        for i in integers
    }
    wanted, largest = float_means(prepared, views, samples, store=store)
    count = int(np.clip(MEMORY // (_ALIVE * largest), 1, len(samples)))
    plain = expanded(file.model)
    tensors = GraphIndex(plain).values
    order = GraphIndex(file.model).order
    steps = Stepper(plain, [sample.inputs for sample in samples[:count]])
    shifts: dict[str, Floats] = {}
    with progress.stage("correcting biases", len(integers)) as advance:
        for integer in sorted(integers, key=lambda i: order[i.node.name or ""]):
            layer, output = integer.layer, name_of(integer.node.outputs[0])
            tensor = output + PLAIN if output + PLAIN in tensors else output
            values = steps.advance(tensor)
            added = file.add_to_bias(integer, shift_of(views[layer.name], wanted[layer.name][:count], values))
            shape = [1, -1] + [1] * (len(layer.shape) - 2) if layer.op_type == "Conv" else [-1]
            steps.add(tensor, added.astype(np.float32).reshape(shape))
            shifts[layer.name] = added
            advance(1)
    return shifts


def shift_of(view: OutputView, wanted: Floats, values: Sequence[NDArray[Any]]) -> Floats:
    """The bias to add, float64 [channels]; 0 where what follows is not finite (a logarithm, a reciprocal).

    Args:
        wanted: the float model's means, float64 [samples, ends, channels].
        values: the quantized model's output for each sample.
    """
    differences, slopes = [], []
    for target, value in zip(wanted, values, strict=True):
        table = view.table(value)
        step = np.float32(max(1e-3, 1e-2 * float(np.abs(table).mean())))
        with np.errstate(invalid="ignore"):
            differences.append(target - view.means(table))
            slopes.append((view.means(table + step) - view.means(table - step)) / (2 * float(step)))
    difference, slope = np.stack(differences), np.mean(slopes, axis=0)
    usable = np.isfinite(difference).all((0, 1)) & np.isfinite(slope).all(0)
    difference, slope = (np.where(usable, values, 0.0) for values in (difference, slope))
    steps = (difference * slope).sum(1) / np.maximum((slope**2).sum(0), _FLAT**2)
    return shrunk(np.where((slope**2).sum(0) > _FLAT**2, steps, 0.0))


def shrunk(differences: Floats) -> Floats:
    """float64 [channels]: the mean of differences [samples, channels] over samples, shrunk by its uncertainty."""
    count = len(differences)
    mean = differences.mean(0)
    if count < 2:
        return np.asarray(mean, np.float64)
    variance = differences.var(0, ddof=1) / count
    sure = np.maximum(0.0, 1.0 - variance / np.maximum(mean**2, np.finfo(np.float64).tiny))
    return np.asarray(mean * sure, np.float64)


RECOVERY = BiasCorrection()
