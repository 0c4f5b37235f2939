"""Run samples through a float model and return the values of its tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.instrumented import InstrumentedModel
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.model.graph import name_of
from edgeq.model.prepare import PreparedModel

Floats = NDArray[np.float64]

_SAMPLES, _POSITIONS = 16, 256


def spread(samples: Samples, count: int) -> Iterator[Any]:
    """Return at most `count` evenly spaced samples."""
    step = max(1, len(samples) // count)
    return itertools.islice(iter(samples), 0, min(len(samples), step * count), step)


def tensor_values(
    prepared: PreparedModel, tensors: Iterable[str], samples: Iterable[Sample]
) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Yield, for each sample, the values of `tensors` and of the model's inputs, by name.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    inputs = {name_of(value) for value in prepared.model.graph.inputs}
    names = [name for name in dict.fromkeys(tensors) if name not in inputs]
    model = InstrumentedModel(prepared.graph, names, keep_layout=names) if names else None
    for sample in samples:
        values = dict(sample.inputs)
        if model is not None:
            values.update(zip(names, model.run(sample.inputs, sample.name), strict=True))
        yield values


def drawn_rows(
    prepared: PreparedModel, axes: Mapping[str, int], samples: Samples, *, positions: int = _POSITIONS
) -> Mapping[str, Floats]:
    """Return tensor → float64[rows, channels]. The rows are drawn from random positions of some samples. Each call
    draws the same rows.

    Args:
        axes: tensor → channel axis.
        positions: largest number of positions drawn from one sample.
    """
    drawn: dict[str, list[Floats]] = {name: [] for name in axes}
    for number, values in enumerate(tensor_values(prepared, axes, spread(samples, _SAMPLES))):
        random = np.random.default_rng(number)
        for name, axis in axes.items():
            table = np.moveaxis(values[name], axis, -1).reshape(-1, values[name].shape[axis])
            places = random.choice(len(table), min(len(table), positions), replace=False)
            drawn[name].append(table[places].astype(np.float64))
    return {name: np.concatenate(parts) for name, parts in drawn.items()}
