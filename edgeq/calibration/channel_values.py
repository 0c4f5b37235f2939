"""Observe the channels of some tensors in one pass of the float model over the samples.

The extrema of each channel cover all samples. Rows of values come from random positions of some samples. With both, the
statistics of a tensor whose channels are scaled follow without another pass (`edgeq.calibration.rescaled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import real_rows, tensor_values
from edgeq.calibration.statistics import Float32s
from edgeq.data.samples import Samples, places
from edgeq.model.prepare import PreparedModel
from edgeq.util.display import SILENT, Progress
from edgeq.util.heap import return_freed_memory

DRAWN_SAMPLES = 16
"""Number of samples from which rows are drawn, spread evenly over all samples."""
# Most positions from a sample, and most values of a tensor: half a MiB.
_POSITIONS, _VALUES = 256, 2**17


@dataclass(frozen=True, eq=False)
class ChannelValues:
    """Hold values of a tensor by channel. Positions that a mask hides are left out.

    Attributes:
        minima, maxima: extrema in each sample, float32 [samples, channels]. If a mask hides a whole sample, they are
            +inf and -inf.
        rows: values at the drawn positions, float32 [rows, channels].
        is_extreme: whether a value of `rows` is one of `minima` or `maxima`, bool [rows, channels].
    """

    minima: Float32s
    maxima: Float32s
    rows: Float32s
    is_extreme: NDArray[np.bool_]

    @property
    def minimum(self) -> Float32s:
        """Return the smallest value of each channel, float32 [channels]."""
        return np.asarray(self.minima.min(0), np.float32)

    @property
    def maximum(self) -> Float32s:
        """Return the largest value of each channel, float32 [channels]."""
        return np.asarray(self.maxima.max(0), np.float32)

    def over(self, factor: NDArray[Any]) -> ChannelValues:
        """Return the values of the tensor after its channels are divided by `factor` [channels], all positive."""
        divisor = np.asarray(factor, np.float32)
        return ChannelValues(self.minima / divisor, self.maxima / divisor, self.rows / divisor, self.is_extreme)


def observe_channels(
    prepared: PreparedModel,
    axes: Mapping[str, int],
    samples: Samples,
    progress: Progress = SILENT,
) -> Mapping[str, ChannelValues]:
    """Return the values of the tensors in `axes` by channel. Each call draws the same positions.

    Args:
        axes: tensor → channel axis.

    Raises:
        DataError: ONNX Runtime refuses a sample.
    """
    drawn = frozenset(places(len(samples), min(len(samples), DRAWN_SAMPLES)))
    extrema: dict[str, list[tuple[Float32s, Float32s]]] = {name: [] for name in axes}
    rows: dict[str, list[tuple[Float32s, NDArray[np.bool_]]]] = {name: [] for name in axes}
    with progress.stage("observing channels", len(samples)) as advance:
        for number, values in enumerate(tensor_values(prepared, axes, samples)):
            for name, axis in axes.items():
                table = real_rows(prepared.graph, name, values, axis).astype(np.float32, copy=False).T
                extrema[name].append((table.min(1, initial=np.inf), table.max(1, initial=-np.inf)))
                if number in drawn and table.size:
                    rows[name].append(_draw(table, np.random.default_rng(number)))
            advance(1)
    # The tensors of all samples have come and gone.
    return_freed_memory()
    return {
        name: ChannelValues(
            *(np.stack(ends) for ends in zip(*extrema[name], strict=True)),
            *(np.concatenate(parts) for parts in zip(*rows[name], strict=True)),
        )
        for name in axes
    }


def _draw(table: Float32s, random: np.random.Generator) -> tuple[Float32s, NDArray[np.bool_]]:
    """Return the values [rows, channels] at some positions of a table [channels, positions], and which of them are the
    extrema of their channel. If a channel has several equal extrema, only the first counts.
    """
    count = max(1, min(_POSITIONS, _VALUES // DRAWN_SAMPLES // len(table)))
    positions = random.permutation(table.shape[1])[:count, None]
    return table[:, positions[:, 0]].T, (positions == table.argmin(1)) | (positions == table.argmax(1))
