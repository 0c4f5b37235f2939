"""Values of tensors, channel by channel, from samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from edgeq.calibrate.collect import collect
from edgeq.calibrate.instrumented import InstrumentedModel
from edgeq.calibrate.statistics import ChannelExtrema
from edgeq.data.samples import Samples
from edgeq.graph.convert import from_proto
from edgeq.model.load import read_model
from edgeq.progress import Progress
from edgeq.tune.recover.layers import Floats
from edgeq.tune.recover.moments import spread

_SAMPLES, _POSITIONS = 16, 256


def channel_extrema(
    source: Path, axes: Mapping[str, int], samples: Samples, progress: Progress
) -> Mapping[str, ChannelExtrema]:
    """Smallest and largest value of each channel of tensors, over all samples.

    Args:
        axes: tensor → where its channels are among its axes.
    """
    statistics = collect(read_model(source), samples, list(axes), channels=axes, progress=progress)
    found = {}
    for name, tensor in statistics.tensors.items():
        assert tensor.channels is not None, "extrema were asked for"
        found[name] = tensor.channels
    return found


def drawn_rows(model: onnx.ModelProto, source: Path, axes: Mapping[str, int], samples: Samples) -> Mapping[str, Floats]:
    """Tensor → float64 [rows, channels], from some positions of some samples.

    Args:
        model: with its weights, or without those that are external; `source` is its file.
        axes: tensor → where its channels are among its axes.
    """
    given = {value.name for value in model.graph.input}
    names = [name for name in axes if name not in given]
    observed = InstrumentedModel(from_proto(model, source.parent), names, keep_layout=names) if names else None
    drawn: dict[str, list[Floats]] = {name: [] for name in axes}
    for number, sample in enumerate(spread(samples, _SAMPLES)):
        random = np.random.default_rng(number)
        values = dict(sample.inputs)
        if observed is not None:
            values.update(zip(names, observed.run(sample.inputs, sample.name), strict=True))
        for name, axis in axes.items():
            table = np.moveaxis(values[name], axis, -1).reshape(-1, values[name].shape[axis])
            places = random.choice(len(table), min(len(table), _POSITIONS), replace=False)
            drawn[name].append(table[places].astype(np.float64))
    return {name: np.concatenate(parts) for name, parts in drawn.items()}
