"""The running totals of one tensor while samples pass by, and how an array is added to them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.histogram import CHUNK, Counter, Histogram, KeyBuffer
from edgeq.calibrate.statistics import ChannelExtrema, TensorStatistics, in_units
from edgeq.errors import CalibrationError

_ONE = np.int64(1)
# np.add.at keeps Python's global lock while it counts, so threads lose nothing by taking turns; the lock says so openly
# and keeps counts right on interpreters without that lock.
_COUNTING = threading.Lock()


@dataclass(frozen=True)
class Seen:
    """What one sample held of one tensor."""

    count: int
    minimum: float
    maximum: float


class Tally:
    """Mutable; `observe` may be called by several threads at once, each with its own buffer."""

    def __init__(self, start: TensorStatistics, channel_axis: int | None = None) -> None:
        self._start = start
        self._counter: Counter | None = None
        self._lock = threading.Lock()
        self._axis = channel_axis
        self._channels = start.channels
        self._dtype = start.dtype
        self._samples, self._nonempty, self._count = start.samples, start.nonempty, start.count
        self._minimum, self._maximum = start.minimum, start.maximum
        self._sums = (start.minimum_sum, start.maximum_sum)

    def observe(self, values: NDArray[Any], buffer: KeyBuffer) -> Seen:
        """Count one sample's values (float32 or float16, any shape) and note their extrema.

        Raises:
            CalibrationError: a value is NaN or infinite.
        """
        if self._counter is None:
            with self._lock:
                self._counter = self._counter or Counter(self._start.histogram)
        flat = np.ascontiguousarray(values).reshape(-1)
        low, high = math.inf, -math.inf
        for begin in range(0, flat.size, CHUNK):
            part = flat[begin : begin + CHUNK].astype(np.float32, copy=False)
            smallest, largest = float(part.min()), float(part.max())
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                raise CalibrationError(_describe(part))
            low, high = min(low, smallest), max(high, largest)
            keys = buffer.keys(part)
            with _COUNTING:
                np.add.at(self._counter.counts, keys, _ONE)
        seen = Seen(flat.size, low + 0.0, high + 0.0)
        self.note(seen, str(values.dtype))
        if self._axis is not None and flat.size:
            self._observe_channels(values, self._axis)
        return seen

    def note(self, seen: Seen, dtype: str) -> None:
        """Add what is known of one sample without its values; for tensors whose histogram is derived."""
        with self._lock:
            self._dtype = dtype
            self._samples += 1
            if not seen.count:
                return
            self._nonempty += 1
            self._count += seen.count
            self._minimum, self._maximum = min(self._minimum, seen.minimum), max(self._maximum, seen.maximum)
            self._sums = (self._sums[0] + in_units(seen.minimum), self._sums[1] + in_units(seen.maximum))

    def freeze(self, histogram: Histogram | None = None) -> TensorStatistics:
        """The totals as a value; `histogram` where it was derived instead of counted."""
        if histogram is None:
            histogram = self._start.histogram
            if self._counter is not None and self._count:
                histogram = self._counter.freeze(self._minimum, self._maximum)
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
        )

    def _observe_channels(self, values: NDArray[Any], axis: int) -> None:
        if axis >= values.ndim:
            raise CalibrationError(f"it has {values.ndim} dimensions and no channel axis {axis}")
        others = tuple(i for i in range(values.ndim) if i != axis)
        extrema = ChannelExtrema(
            axis,
            values.min(axis=others).astype(np.float32) + np.float32(0),
            values.max(axis=others).astype(np.float32) + np.float32(0),
        )
        with self._lock:
            self._channels = extrema if self._channels is None else self._channels.merge(extrema)


def _describe(part: NDArray[np.float32]) -> str:
    return "it holds NaN" if np.isnan(part).any() else "it holds an infinity"
