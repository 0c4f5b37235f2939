"""Run samples through a float model and return the values of its tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from edgeq_device.measure.pairs import find_visible
from numpy.typing import NDArray

from edgeq.calibration.instrumented import InstrumentedModel
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.padding import find_padding
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


def real_rows(graph: GraphIndex, name: str, values: Mapping[str, NDArray[Any]], axis: int) -> NDArray[Any]:
    """Return a tensor of one sample as a table [rows, channels], without the positions that a mask hides.

    Args:
        graph: the model.
        values: values of the tensor and of the model's inputs, as `tensor_values` yields them.
        axis: index of the channel axis.
    """
    array = values[name]
    table = np.moveaxis(array, axis, -1)
    visible = find_visible(find_padding(graph), name, array.shape, values)
    if visible is not None:
        marks = np.moveaxis(np.broadcast_to(visible, array.shape), axis, -1)
        # If the channels are the positions themselves, each row has hidden elements.
        if (marks.all(axis=-1) == marks.any(axis=-1)).all():
            table = table[marks[..., 0]]
    return np.asarray(table.reshape(-1, table.shape[-1]))


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
            table = real_rows(prepared.graph, name, values, axis)
            places = random.choice(len(table), min(len(table), positions), replace=False)
            drawn[name].append(table[places].astype(np.float64))
    return {name: np.concatenate(parts) for name, parts in drawn.items()}
