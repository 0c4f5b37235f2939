"""Compare the mean of a layer's output with float32's, and find the bias that makes them equal.

Rounding and clipping shift the mean of a layer's output, channel by channel. The mean is compared after the activation
function f that follows the layer. Before a SiLU or before a detector's score, most values may be far below zero. Errors
in these values have no effect, but would dominate the mean. With y the float output and z the quantized model's, both
clipped to the range of its integers, the bias d is one Newton step:

    d = (mean f(y) - mean f(z)) / mean f'(z)

A mean over few samples is uncertain. Let v be the variance of d over samples, divided by the number of samples. The
correction is d (1 - v / d^2) if the factor in parentheses is positive, else 0. So a difference that is only noise is
not corrected (positive-part shrinkage of James and Stein).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import tensor_values
from edgeq.data.samples import Sample
from edgeq.model.memory import partitions
from edgeq.model.prepare import PreparedModel
from edgeq.tuning.recover.followers import Function
from edgeq.tuning.recover.layers import Floats, WeightedLayer

# Slopes of the activation function below this count as zero, because the bias of such a channel has no effect.
_MIN_SLOPE = 0.02
# Number of positions of a sample that are evaluated.
_POSITIONS = 1024
_BATCH = 2**16
"""Number of elements that the activation function gets in one call, so that its results fit the cache."""


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
        """Return some positions of a tensor as float32 [channels, positions]. The positions are the same for all
        tensors of one shape.
        """
        axis = self.layer.channel_axis % value.ndim
        # Without a batch, the channels are in front already, so that this copies nothing.
        table = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
        if table.shape[1] > _POSITIONS:
            # Choose them at random, because every n-th position may be one column of the image.
            table = table.take(np.random.default_rng(0).integers(0, table.shape[1], _POSITIONS), axis=1)
        low, high = (np.float32(limit) for limit in self.limits)
        return np.asarray(np.clip(table, low, high), np.float32)

    def means(self, tables: Sequence[NDArray[np.float32]]) -> Floats:
        """Return the means of the output after the activation function: float64 [tables, ends, channels]."""
        means: list[Floats] = []
        # One call for several small tables costs less, but arrays that fit no cache cost more.
        for batch in partitions(((table, table.size) for table in tables), _BATCH):
            columns = np.concatenate(batch, axis=1)
            with np.errstate(invalid="ignore"):
                outputs = self.function(columns).reshape(-1, *columns.shape)
                starts = np.cumsum([0, *(table.shape[1] for table in batch)])
                means += [outputs[..., i:j].mean(2, dtype=np.float64) for i, j in itertools.pairwise(starts)]
        return np.stack(means)


def measure_float_means(
    prepared: PreparedModel, views: Mapping[str, OutputView], samples: Sequence[Sample]
) -> tuple[Mapping[str, Floats], int]:
    """Return the means of each layer in the float model, by the layer's name, from one run of each sample.

    Returns:
        (float64 [samples, ends, channels] of each layer, bytes of the largest output).

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    means: dict[str, list[Floats]] = {name: [] for name in views}
    largest = 1
    for values in tensor_values(prepared, [view.layer.output for view in views.values()], samples):
        for name, view in views.items():
            value = values[view.layer.output]
            means[name].append(view.means([view.table(value)])[0])
            largest = max(largest, value.nbytes)
    return {name: np.stack(rows) for name, rows in means.items()}, largest


def find_shift(view: OutputView, targets: Floats, values: Sequence[NDArray[Any]]) -> Floats:
    """Return the bias to add, float64 [channels]. The bias is 0 if the function that follows is not finite (a
    logarithm, a reciprocal).

    Args:
        targets: the float model's means, float64 [samples, ends, channels].
        values: the quantized model's output for each sample.
    """
    tables = [view.table(value) for value in values]
    # The slope is a difference over this step. A smaller one would be lost in float32's rounding.
    step = np.float32(max(1e-3, 1e-2 * float(np.mean([np.abs(table).mean() for table in tables]))))
    means = view.means(tables)
    with np.errstate(invalid="ignore"):
        difference = targets - means
        slope = (view.means([table + step for table in tables]) - means).mean(0) / float(step)
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
