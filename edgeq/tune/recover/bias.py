"""Bias correction in context: each layer's mean error, channel by channel, taken off where it arises.

Rounding and clipping shift the mean of a layer's output, and the shifts add up from layer to layer. In the order of the
graph, each layer of the quantized model is fed what the corrected layers before it give; the mean difference of its
output from the float model's goes into its int32 bias (Nagel et al. 2019, "Data-Free Quantization Through Weight
Equalization and Bias Correction", section 4.2, with data instead of their assumptions). All at once would correct what
earlier corrections have corrected already, and diverges.

A mean over few samples is uncertain. With d the mean difference and s^2 the variance of that mean, d (1 - s^2 / d^2),
where positive, is what is corrected: noise is left alone (positive-part shrinkage of James and Stein).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeq.calibrate.observed import ObservedModel
from edgeq.data.samples import Sample, Samples
from edgeq.model.load import load_model
from edgeq.progress import Progress
from edgeq.tune.recover.artifact import IntegerLayer, QuantizedFile
from edgeq.tune.recover.base import Stage, State
from edgeq.tune.recover.expand import expanded
from edgeq.tune.recover.layers import Floats, Layer, find_layers
from edgeq.tune.recover.moments import spread
from edgeq.tune.recover.stepper import Stepper

SAMPLES = 32
MEMORY = 2**29
"""Bytes that the activations of all samples may take at once; fewer samples are used where they would take more."""
# Tensors of the largest size that are alive at once, on both sides of a branch and of Q/DQ nodes.
_ALIVE = 4


@dataclass(frozen=True)
class BiasCorrection:
    """The recovery. The nodes stay as they are."""

    name: str = "bias-correction"
    title: str = "mean error of each layer's output taken off in its bias"
    stage: Stage = "artifact"
    free: bool = True

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
        chosen = list(spread(samples, SAMPLES))
        shifts = correct(graph, source, file, integers, chosen, progress)
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
        graph: the float model at `source`; its weights need not be loaded.
        samples: how many are used is bounded by `MEMORY`.

    Returns:
        What was added to each layer's bias, float64 [outputs], by the layer's name.
    """
    means, largest = _float_means(graph, source, [i.layer for i in integers], samples)
    count = int(np.clip(MEMORY // (_ALIVE * largest), 1, len(samples)))
    nodes, extra = expanded(file.model)
    made = {node.name: node.output[0] for node in nodes}
    steps = Stepper(file.model, [sample.inputs for sample in samples[:count]], nodes=nodes, extra=extra)
    shifts: dict[str, Floats] = {}
    with progress.stage("correcting biases", len(integers)) as advance:
        for integer in _in_order(file, integers):
            layer = integer.layer
            tensor = made[integer.node]
            now = np.stack([_channel_means(value, layer) for value in steps.advance(tensor)])
            added = file.add_to_bias(integer, shrunk(means[layer.name][:count] - now))
            shape = [1, -1] + [1] * (len(layer.shape) - 2) if layer.op_type == "Conv" else [-1]
            shift = added.astype(np.float32).reshape(shape)
            steps.change(tensor, lambda value, shift=shift: value + shift)  # type: ignore[misc]
            shifts[layer.name] = added
            advance(1)
    return shifts


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
    graph: onnx.ModelProto, source: Path, layers: Sequence[Layer], samples: Sequence[Sample]
) -> tuple[Mapping[str, Floats], int]:
    """(mean output [samples, channels] of each layer in the float model, bytes of the largest output)."""
    names = [layer.output for layer in layers]
    model = ObservedModel(graph, source, names, keep_layout=names)
    collected: dict[str, list[Floats]] = {layer.name: [] for layer in layers}
    largest = 1
    for sample in samples:
        for layer, value in zip(layers, model.run(sample.inputs, sample.name), strict=True):
            collected[layer.name].append(_channel_means(value, layer))
            largest = max(largest, value.nbytes)
    return {name: np.stack(rows) for name, rows in collected.items()}, largest


def _channel_means(value: NDArray[Any], layer: Layer) -> Floats:
    axis = layer.channel_axis % value.ndim
    others = tuple(a for a in range(value.ndim) if a != axis)
    return np.asarray(value.mean(others, dtype=np.float64))


def _in_order(file: QuantizedFile, integers: Sequence[IntegerLayer]) -> list[IntegerLayer]:
    place = {node.name: index for index, node in enumerate(file.model.graph.node)}
    return sorted(integers, key=lambda integer: place[integer.node])
