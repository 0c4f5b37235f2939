"""The running totals of one tensor while samples pass by, and how an array is added to them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.histogram import CHUNK, Counter, Histogram
from edgeq.calibrate.statistics import FINITE, ChannelExtrema, Nonfinite, TensorStatistics, in_units
from edgeq.errors import CalibrationError

ALL_COUNTED = 1 << 13
"""Elements of one tensor in one sample up to which all are counted, whatever came before."""
SPREAD = 1 << 12
"""Elements of a larger one that are counted in a sample once there is `PLENTY`."""
PLENTY = 1 << 18
"""Once the samples before would hold so many elements, if all were as large as this one, only an evenly spread part of
a larger tensor is counted, each element for those that it stands for. Extrema are always those of all elements."""
LARGE = 1 << 15
"""Elements from which on a tensor need not be fetched for that part and its extrema (`edgeq.calibrate.reduced`)."""


@dataclass(frozen=True)
class Seen:
    """The finite elements of one tensor in one sample, and the number of others."""

    count: int
    minimum: float
    maximum: float
    dtype: str
    nonfinite: Nonfinite = FINITE


@dataclass(frozen=True)
class Part:
    """A tensor of one sample without its values: the extrema of its `size` elements, all finite, and in float32
    `values` every `stride`-th of them."""

    values: NDArray[np.float32]
    size: int
    stride: int
    minimum: float
    maximum: float


class Observer:
    """Mutable; `observe` may be called by several threads at once."""

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

    def observe(self, values: NDArray[Any] | Part, place: int = 0) -> Seen:
        """Count one sample's finite values (float32 or float16, any shape) and note their extrema.

        Args:
            values: a `Part` where the sample's `place` is one at which no more of it is counted.
            place: the sample's place among the samples, from 0. Deciding by it, not by what other threads have done by
                now, keeps the result the same every time.
        """
        with self._lock:
            counter = self._counter = self._counter or Counter(self._start.histogram)
        if isinstance(values, Part):
            with self._lock:
                counter.add(values.values, values.stride)
            seen = Seen(values.size, values.minimum + 0.0, values.maximum + 0.0, dtype_name(values.values))
        else:
            seen = self._add(values, place, counter)
            if self._axis is not None and seen.count:
                self._observe_channels(values, self._axis)
        self.note(seen)
        return seen

    def _add(self, values: NDArray[Any], place: int, counter: Counter) -> Seen:
        flat = np.ascontiguousarray(values).reshape(-1)
        plenty = flat.size > ALL_COUNTED and place * flat.size >= PLENTY
        stride = spread_stride(values.shape) if plenty and not self._every else 1
        low, high = math.inf, -math.inf
        nonfinite = FINITE
        for begin in range(0, flat.size, CHUNK):
            part = flat[begin : begin + CHUNK].astype(np.float32, copy=False)
            step = stride
            smallest, largest = float(np.minimum.reduce(part)), float(np.maximum.reduce(part))
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
        return Seen(count, low + 0.0, high + 0.0, dtype_name(values), nonfinite)

    def note(self, seen: Seen) -> None:
        """Add what is known of one sample without its values; for tensors whose histogram is derived."""
        with self._lock:
            self._dtype = seen.dtype
            self._samples += 1
            self._nonfinite += seen.nonfinite
            if not seen.count:
                return
            self._nonempty += 1
            self._count += seen.count
            self._minimum, self._maximum = min(self._minimum, seen.minimum), max(self._maximum, seen.maximum)
            self._sums = (self._sums[0] + in_units(seen.minimum), self._sums[1] + in_units(seen.maximum))

    @property
    def nonfinite(self) -> Nonfinite:
        """The elements so far that were no finite numbers."""
        return self._nonfinite

    def freeze(self, histogram: Histogram | None = None, *, last: bool = False) -> TensorStatistics:
        """The totals as a value.

        Args:
            histogram: the tensor's, where it was derived instead of counted.
            last: nothing will be observed any more, so let go of the memory.
        """
        if histogram is None:
            histogram = self._start.histogram
            if self._counter is not None and self._count:
                histogram = self._counter.freeze(self._minimum, self._maximum)
            if last:
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

    def _observe_channels(self, values: NDArray[Any], axis: int) -> None:
        if axis >= values.ndim:
            raise CalibrationError(f"it has {values.ndim} dimensions and no channel axis {axis}")
        others = tuple(i for i in range(values.ndim) if i != axis)
        finite = np.isfinite(values)
        extrema = ChannelExtrema(
            axis,
            values.min(axis=others, where=finite, initial=np.inf).astype(np.float32) + np.float32(0),
            values.max(axis=others, where=finite, initial=-np.inf).astype(np.float32) + np.float32(0),
        )
        with self._lock:
            self._channels = extrema if self._channels is None else self._channels.merge(extrema)


def dtype_name(values: NDArray[Any]) -> str:
    """ "float16" or "float32"; numpy's own names take ten times as long."""
    return "float16" if values.dtype == np.float16 else "float32"


@lru_cache(maxsize=4096)
def spread_stride(shape: tuple[int, ...]) -> int:
    """The step from one counted element to the next, so that about SPREAD are.

    It has no factor in common with any dimension, nor with the channel blocks of blocked layouts, so the steps walk
    through all channels, rows and columns evenly.
    """
    stride = -(-math.prod(shape) // SPREAD)
    while any(math.gcd(stride, size) > 1 for size in (*shape, 2)):
        stride += 1
    return stride


def _nonfinite(part: NDArray[np.float32]) -> Nonfinite:
    return Nonfinite(*(int(np.count_nonzero(found)) for found in (np.isnan(part), part == -np.inf, part == np.inf)))
