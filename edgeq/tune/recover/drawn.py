"""Values of layers' outputs, drawn from samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from edgeq.calibrate.collect import collect
from edgeq.calibrate.observed import ObservedModel
from edgeq.calibrate.statistics import ChannelExtrema
from edgeq.data.samples import Samples
from edgeq.progress import Progress
from edgeq.tune.recover.layers import Floats, Layer
from edgeq.tune.recover.moments import spread

_SAMPLES, _POSITIONS = 16, 256


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


def drawn_rows(model: onnx.ModelProto, source: Path, layers: Sequence[Layer], samples: Samples) -> Mapping[str, Floats]:
    """Output tensor → float64 [rows, channels], from some positions of some samples.

    Args:
        model: with its weights, or without those that are external; `source` is its file.
    """
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
