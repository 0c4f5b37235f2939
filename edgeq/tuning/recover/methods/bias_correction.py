"""Correct biases in context: subtract each layer's mean error, channel by channel, where it arises.

Rounding and clipping shift the mean of a layer's output, and the shifts add up from layer to layer. So the layers are
corrected in the order of the graph. Each layer of the quantized model gets the outputs of the corrected layers before
it, and the mean difference from the float model goes into its int32 bias (Nagel et al. 2019, "Data-Free Quantization
Through Weight Equalization and Bias Correction", section 4.2, with data instead of their assumptions). Correcting all
layers at once would repeat earlier corrections, and diverge.

The mean is compared after the activation function f that follows the layer. Before a SiLU or before a detector's score,
most values may be far below zero. Errors in these values have no effect, but would dominate the mean. With y the float
output and z the quantized model's, both clipped to the range of its integers, the bias d is one Newton step:

    d = (mean f(y) - mean f(z)) / mean f'(z)

A mean over few samples is uncertain. Let v be the variance of d over samples, divided by the number of samples. The
correction is d (1 - v / d^2) if the factor in parentheses is positive, else 0. So a difference that is only noise is
not corrected (positive-part shrinkage of James and Stein).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import spread, tensor_values
from edgeq.data.samples import Sample, Samples
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.prepare import PreparedModel
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.expansion import PLAIN, expand_integers
from edgeq.tuning.recover.followers import Followers, Function
from edgeq.tuning.recover.layers import Floats, WeightedLayer, find_layers
from edgeq.tuning.recover.quantized_file import IntegerLayer, QuantizedFile
from edgeq.tuning.recover.stepper import Stepper
from edgeq.util.display import Progress

SAMPLES = 32
MEMORY = 2**29
"""Bytes that the activations of all samples may take at once. It limits the number of samples."""
# Number of tensors of the largest size that are in memory at once, on both sides of a branch and of Q/DQ nodes.
_TENSORS_IN_MEMORY = 4
# Slopes of the activation function below this count as zero, because the bias of such a channel has no effect.
_MIN_SLOPE = 0.02
# Number of positions of a sample that are evaluated.
_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class OutputView:
    """Describe the part of a layer's output that is compared: the values at some positions, taken after the
    activation function and clipped to the integer range.

    Attributes:
        function: the element-wise function that follows the layer.
        limits: ends of the integer range.
    """

    layer: WeightedLayer
    function: Function
    limits: tuple[float, float]

    def table(self, value: NDArray[Any]) -> NDArray[np.float32]:
        """Return some positions of a tensor as float32 [positions, channels]. The positions are the same for all
        tensors of one shape.
        """
        axis = self.layer.channel_axis % value.ndim
        table = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis])
        if len(table) > _POSITIONS:
            # Choose them at random, because every n-th position may be one column of the image.
            table = table[np.random.default_rng(0).integers(0, len(table), _POSITIONS)]
        low, high = (np.float32(limit) for limit in self.limits)
        return np.asarray(np.clip(table, low, high), np.float32)

    def means(self, table: NDArray[np.float32]) -> Floats:
        """Return the means of the output after the activation function: float64 [ends, channels]."""
        with np.errstate(invalid="ignore"):
            outputs = self.function(table).reshape(-1, *table.shape)
            return np.asarray(np.add.reduce(outputs, axis=1, dtype=np.float64) / len(table), np.float64)


def measure_float_means(
    prepared: PreparedModel, views: Mapping[str, OutputView], samples: Sequence[Sample], *, store: Path | None = None
) -> tuple[Mapping[str, Floats], int]:
    """Return the means of each layer in the float model, by the layer's name.

    Args:
        store: a folder that keeps the means for further calls with the same samples. A search, for example, quantizes
            one float model in many ways.

    Returns:
        (float64 [samples, ends, channels] of each layer, bytes of the largest output).
    """
    files = {name: _means_file(store, prepared, view) for name, view in views.items()} if store is not None else {}
    means_by_layer: dict[str, tuple[Floats, int]] = {}
    for name, file in files.items():
        if file.exists():
            with np.load(file, allow_pickle=False) as arrays:
                means_by_layer[name] = arrays["means"], int(arrays["largest"])
    missing = {name: view for name, view in views.items() if name not in means_by_layer}
    for name, (means, largest) in _compute_means(prepared, missing, samples).items():
        means_by_layer[name] = means, largest
        if store is not None:
            np.savez(files[name], means=means, largest=largest)
    return {name: means for name, (means, _) in means_by_layer.items()}, max(
        (size for _, size in means_by_layer.values()), default=1
    )


def _compute_means(
    prepared: PreparedModel, views: Mapping[str, OutputView], samples: Sequence[Sample]
) -> dict[str, tuple[Floats, int]]:
    """Return (means, bytes of the largest output) for each layer."""
    if not views:
        return {}
    means: dict[str, list[Floats]] = {name: [] for name in views}
    largest = dict.fromkeys(views, 1)
    for values in tensor_values(prepared, [view.layer.output for view in views.values()], samples):
        for name, view in views.items():
            value = values[view.layer.output]
            means[name].append(view.means(view.table(value)))
            largest[name] = max(largest[name], value.nbytes)
    return {name: (np.stack(rows), largest[name]) for name, rows in means.items()}


def _means_file(store: Path, prepared: PreparedModel, view: OutputView) -> Path:
    text = repr((prepared.digest, view.layer.name, view.limits))
    return store / f"means-{hashlib.sha256(text.encode()).hexdigest()}.npz"


@dataclass(frozen=True)
class BiasCorrection(Recovery):
    """Correct biases. The nodes do not change."""

    name: str = "bias-correction"
    title: str = "mean error of each layer's output subtracted in its bias"
    stage: Stage = "artifact"
    free: bool = True
    slow = True
    order = 80

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Correct the biases of `state`.

        Raises:
            EdgeqError: a model refuses a sample.
        """
        assert state.artifact is not None
        file = QuantizedFile.load(state.artifact.model)
        layers = find_layers(state.prepared.model)
        # A bias that two layers share cannot be right for both.
        integers = [i for i in file.integer_layers(layers) if i.bias is not None and not i.has_other_readers]
        if not integers:
            return state.note(f"{self.name}: no layer has an int32 bias of its own")
        subset = list(spread(samples, SAMPLES))
        shifts = correct_biases(state.prepared, file, integers, subset, progress, store=workdir.parent)
        path = workdir / state.artifact.model.name
        file.save(path)
        changed_count = sum(bool(np.any(shift)) for shift in shifts.values())
        return state.replace(artifact=replace(state.artifact, model=path)).note(
            f"{self.name}: the means of {changed_count} of {len(integers)} layers corrected"
        )


def correct_biases(
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
        samples: calibration samples; `MEMORY` limits how many are used.
        store: see `measure_float_means`.

    Returns:
        The change of each layer's bias, float64 [outputs], by the layer's name.

    Raises:
        EdgeqError: a model refuses a sample.
    """
    followers = Followers(prepared.model)
    views = {
        i.layer.name: OutputView(
            i.layer, followers.function(followers.find(i.layer.output), np.float32), file.output_range(i)
        )
        for i in integers
    }
    targets, largest = measure_float_means(prepared, views, samples, store=store)
    # Large activations leave room for fewer samples, but one is always used.
    count = int(np.clip(MEMORY // (_TENSORS_IN_MEMORY * largest), 1, len(samples)))
    expanded_model = expand_integers(file.model)
    tensors = GraphIndex(expanded_model).values
    order = GraphIndex(file.model).order
    steps = Stepper(expanded_model, [sample.inputs for sample in samples[:count]])
    shifts: dict[str, Floats] = {}
    with progress.stage("correcting biases", len(integers)) as advance:
        for integer in sorted(integers, key=lambda i: order[i.node.name or ""]):
            layer, output = integer.layer, name_of(integer.node.outputs[0])
            tensor = output + PLAIN if output + PLAIN in tensors else output
            values = steps.advance(tensor)
            added = file.add_to_bias(integer, find_shift(views[layer.name], targets[layer.name][:count], values))
            shape = [1, -1] + [1] * (len(layer.shape) - 2) if layer.op_type == "Conv" else [-1]
            steps.add(tensor, added.astype(np.float32).reshape(shape))
            shifts[layer.name] = added
            advance(1)
    return shifts


def find_shift(view: OutputView, targets: Floats, values: Sequence[NDArray[Any]]) -> Floats:
    """Return the bias to add, float64 [channels]. The bias is 0 if the function that follows is not finite (a
    logarithm, a reciprocal).

    Args:
        targets: the float model's means, float64 [samples, ends, channels].
        values: the quantized model's output for each sample.
    """
    differences, slopes = [], []
    for target, value in zip(targets, values, strict=True):
        table = view.table(value)
        # The slope is a difference over this step. A smaller one would be lost in float32's rounding.
        step = np.float32(max(1e-3, 1e-2 * float(np.abs(table).mean())))
        with np.errstate(invalid="ignore"):
            differences.append(target - view.means(table))
            slopes.append((view.means(table + step) - view.means(table - step)) / (2 * float(step)))
    difference, slope = np.stack(differences), np.mean(slopes, axis=0)
    usable = np.isfinite(difference).all((0, 1)) & np.isfinite(slope).all(0)
    difference, slope = (np.where(usable, values, 0.0) for values in (difference, slope))
    steps = (difference * slope).sum(1) / np.maximum((slope**2).sum(0), _MIN_SLOPE**2)
    return shrink(np.where((slope**2).sum(0) > _MIN_SLOPE**2, steps, 0.0))


def shrink(differences: Floats) -> Floats:
    """Return the mean of differences [samples, channels] over samples. Each channel's mean is shrunk by its
    uncertainty.
    """
    count = len(differences)
    mean = differences.mean(0)
    if count < 2:
        return np.asarray(mean, np.float64)
    variance = differences.var(0, ddof=1) / count
    sure = np.maximum(0.0, 1.0 - variance / np.maximum(mean**2, np.finfo(np.float64).tiny))
    return np.asarray(mean * sure, np.float64)


RECOVERY = BiasCorrection()
