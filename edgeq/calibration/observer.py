"""Count the values of one tensor over all samples: their extrema, and a sample of the elements of large tensors."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.statistics import (
    CHUNK,
    FINITE,
    ChannelExtrema,
    Counter,
    Histogram,
    Nonfinite,
    TensorStatistics,
    in_units,
)
from edgeq.errors import CalibrationError

ALL_COUNTED = 1 << 13
"""Size of the largest tensor, in elements, that is counted completely in every sample."""
SPREAD = 1 << 12
"""Approximate number of elements that are counted in each sample of a larger tensor, after the first `PLENTY` elements.
"""
PLENTY = 1 << 18
"""Number of elements after which only an evenly spaced part is counted, for a tensor of more than `ALL_COUNTED`
elements. The number of earlier elements is estimated: edgeq assumes that the tensor had its current size in all earlier
samples. Each counted element has the weight of the elements that it represents. Extrema always include all elements.
"""
LARGE = 1 << 15
"""Size of the smallest tensor, in elements, whose part and extrema are computed in the graph. Such a tensor need not be
fetched."""


@dataclass(frozen=True)
class Tally:
    """Hold the number, extrema and dtype of the finite elements of one tensor in one sample, and the numbers of NaN and
    infinite elements.
    """

    count: int
    minimum: float
    maximum: float
    dtype: str
    nonfinite: Nonfinite = FINITE


@dataclass(frozen=True)
class Part:
    """Summarise a tensor of one sample without keeping all its values. A Part contains the extrema of all `size`
    elements, which are finite, and every `stride`-th element in `values`. The dtype is float32.
    """

    values: NDArray[np.float32]
    size: int
    stride: int
    minimum: float
    maximum: float


class Observer:
    """Observe one tensor over all samples. Several threads may call `observe` at once."""

    def __init__(
        self, start: TensorStatistics, channel_axis: int | None = None, *, every_element: bool = False
    ) -> None:
        self._every = every_element
        self._start = start
        self._counter: Counter | None = None
        self._lock = threading.Lock()
        self._axis = channel_axis
        self._channels = start.channels
        self._dtype = start.dtype
        self._samples, self._nonempty, self._count = start.samples, start.nonempty, start.count
        self._minimum, self._maximum = start.minimum, start.maximum
        self._sums = (start.minimum_sum, start.maximum_sum)
        self._nonfinite = start.nonfinite

    def observe(
        self, values: NDArray[Any] | Part, place: int = 0, *, visible: NDArray[np.bool_] | None = None
    ) -> Tally:
        """Count one sample's finite values (float32 or float16, any shape) and update the extrema.

        Args:
            values: all values, or a `Part` if only a part is counted at this `place`.
            visible: which values count, in a shape that broadcasts to that of `values`; None means all.
            place: index of the sample, from 0. The counted part depends on this index and not on the progress of other
                threads, so the result is always the same.
        """
        # Created at the first sample: a tensor whose histogram is derived never needs a counter.
        with self._lock:
            counter = self._counter = self._counter or Counter(self._start.histogram)
        # The extrema of a part are those of all elements, which the graph has computed.
        if isinstance(values, Part):
            with self._lock:
                counter.add(values.values, values.stride)
            tally = Tally(values.size, values.minimum + 0.0, values.maximum + 0.0, dtype_name(values.values))
        else:
            visible_values = values if visible is None else values[np.broadcast_to(visible, values.shape)]
            tally = self._add(visible_values, place, counter)
            if self._axis is not None and tally.count:
                self._observe_channels(values, self._axis, visible)
        self.note(tally)
        return tally

    def _add(self, values: NDArray[Any], place: int, counter: Counter) -> Tally:
        flat = np.ascontiguousarray(values).reshape(-1)
        plenty = flat.size > ALL_COUNTED and place * flat.size >= PLENTY
        stride = spread_stride(values.shape) if plenty and not self._every else 1
        low, high = math.inf, -math.inf
        nonfinite = FINITE
        for begin in range(0, flat.size, CHUNK):
            part = flat[begin : begin + CHUNK].astype(np.float32, copy=False)
            step = stride
            smallest, largest = float(np.minimum.reduce(part)), float(np.maximum.reduce(part))
            # The extrema show NaN and infinities at no cost, so only such parts are searched element by element.
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                nonfinite += _nonfinite(part)
                part, step = part[np.isfinite(part)], 1
                smallest = float(np.minimum.reduce(part, initial=math.inf))
                largest = float(np.maximum.reduce(part, initial=-math.inf))
            low, high = min(low, smallest), max(high, largest)
            if step > 1:
                part = part[-begin % step :: step]
            with self._lock:
                counter.add(part, step)
        count = flat.size - nonfinite.nan - nonfinite.below - nonfinite.above
        return Tally(count, low + 0.0, high + 0.0, dtype_name(values), nonfinite)

    def note(self, tally: Tally) -> None:
        """Add the figures of one sample without its values. This is enough for tensors whose histogram is derived."""
        with self._lock:
            self._dtype = tally.dtype
            self._samples += 1
            self._nonfinite += tally.nonfinite
            if not tally.count:
                return
            self._nonempty += 1
            self._count += tally.count
            self._minimum, self._maximum = min(self._minimum, tally.minimum), max(self._maximum, tally.maximum)
            self._sums = (self._sums[0] + in_units(tally.minimum), self._sums[1] + in_units(tally.maximum))

    @property
    def nonfinite(self) -> Nonfinite:
        """Return how many elements so far were NaN or infinite."""
        return self._nonfinite

    def freeze(self, histogram: Histogram | None = None, *, release: bool = False) -> TensorStatistics:
        """Return the totals so far as an immutable value.

        Args:
            histogram: the tensor's histogram if it was derived instead of counted.
            release: whether to free the memory. No more samples may be observed then.
        """
        if histogram is None:
            histogram = self._start.histogram
            if self._counter is not None and self._count:
                histogram = self._counter.freeze(self._minimum, self._maximum)
            if release:
                self._counter = None
        return TensorStatistics(
            self._dtype,
            self._samples,
            self._nonempty,
            self._count,
            self._minimum,
            self._maximum,
            *self._sums,
            histogram,
            self._channels,
            self._nonfinite,
        )

    def _observe_channels(self, values: NDArray[Any], axis: int, visible: NDArray[np.bool_] | None) -> None:
        if axis >= values.ndim:
            raise CalibrationError(f"it has {values.ndim} dimensions and no channel axis {axis}")
        reduced_axes = tuple(i for i in range(values.ndim) if i != axis)
        finite = np.isfinite(values) if visible is None else np.isfinite(values) & visible
        extrema = ChannelExtrema(
            axis,
            values.min(axis=reduced_axes, where=finite, initial=np.inf).astype(np.float32) + np.float32(0),
            values.max(axis=reduced_axes, where=finite, initial=-np.inf).astype(np.float32) + np.float32(0),
        )
        with self._lock:
            self._channels = extrema if self._channels is None else self._channels.merge(extrema)


def dtype_name(values: NDArray[Any]) -> str:
    """Return "float16" or "float32". Asking numpy for the name takes ten times as long."""
    return "float16" if values.dtype == np.float16 else "float32"


@lru_cache(maxsize=4096)
def spread_stride(shape: tuple[int, ...]) -> int:
    """Return the distance between counted elements, chosen so that about SPREAD elements are counted.

    The distance has no common factor with any dimension or with the block size of blocked layouts. So the counted
    elements are spread evenly over channels, rows and columns.
    """
    stride = -(-math.prod(shape) // SPREAD)
    while any(math.gcd(stride, size) > 1 for size in (*shape, 2)):
        stride += 1
    return stride


def _nonfinite(part: NDArray[np.float32]) -> Nonfinite:
    return Nonfinite(*(int(np.count_nonzero(mask)) for mask in (np.isnan(part), part == -np.inf, part == np.inf)))
