"""Hold the results of one float32 pass over the samples as values that can be merged exactly.

The bins of a histogram are float32 bit patterns, cut to ten mantissa bits. A bin is identified by its key: the upper 19
bits of a float32 (sign, eight exponent bits, ten mantissa bits). So every octave has 1024 bins, all tensors always have
the same bins, and the range need not be known in advance. Merging two histograms only adds integers, so it is exact,
associative and commutative.

To make a linear histogram over a window ±2^k, with 4096 bins on each side of zero, edgeq merges the recorded bins. Each
recorded bin is inside one linear bin, except in the window's top octave. There, a recorded bin is twice as wide as a
linear bin, and adds half of its count to each of the two linear bins that it covers. A float16 value has ten mantissa
bits, as many as the recorded bins resolve, so float16 tensors are recorded without loss.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import CalibrationError, UsageError
from edgeq.util.display import Displayed
from edgeq.util.records import Count

MANTISSA_BITS = 10
# A float32 has 23 mantissa bits. This many are cut off.
_SHIFT = 23 - MANTISSA_BITS
# The sign is the highest bit of a key, above eight exponent bits and the mantissa.
_SIGN = 1 << (8 + MANTISSA_BITS)
KEYS = 2 * _SIGN
"""Number of keys: 2^19."""
# The key of infinity without its sign: all exponent bits are set. Keys from here on are not finite.
_INFINITE = 255 << MANTISSA_BITS

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

CHUNK = 1 << 16
"""Number of values that are counted at a time. The number is small enough for the caches, and large enough to make the
cost of a call negligible."""
# A buffer begins with this many keys. Histograms with at most this many bins are merged by sorting.
_SMALL_BUFFER = 1 << 10
# Largest count that an entry of a table can hold.
_MAX_COUNT = 2**32 - 1
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Count values by bin. Only bins that contain values are stored.

    Attributes:
        keys: uint32[n], sorted by the *value* of the bins (most negative first).
        counts: int64[n], all positive.
    """

    keys: NDArray[np.uint32]
    counts: Int64s

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.keys, other.keys) and np.array_equal(self.counts, other.counts)

    def __hash__(self) -> int:
        return hash((self.keys.tobytes(), self.counts.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the counts in the narrowest type that fits the largest count, because worker processes send millions
        of bins.
        """
        narrow = np.min_scalar_type(int(self.counts.max(initial=0)))
        return _received, (self.keys, self.counts.astype(narrow))

    @property
    def total(self) -> int:
        """Return the number of values that were counted."""
        return int(self.counts.sum())

    def merge(self, histogram: Histogram) -> Histogram:
        """Return the histogram of the values of both histograms. It is exact, because counts are integers."""
        if not (self.keys.size and histogram.keys.size):
            return self if self.keys.size else histogram
        return _collect(np.concatenate([self.keys, histogram.keys]), np.concatenate([self.counts, histogram.counts]))

    def clip(self, low: float, high: float) -> Histogram:
        """Return the exact histogram of min(max(x, low), high). The bins of the bounds count the clipped values."""
        order = order_of(self.keys)
        low_key, high_key = order_of(_keys_of(np.array([low + 0.0, high + 0.0], np.float32)))
        start, stop = np.searchsorted(order, [low_key, high_key + 1])
        below, above = int(self.counts[:start].sum()), int(self.counts[stop:].sum())
        # Nothing is clipped, so both tensors share one histogram, and its range is computed only once.
        if not below and not above:
            return self
        ends = _collect(
            from_order(np.array([low_key, high_key])[[below > 0, above > 0]]),
            np.array([n for n in (below, above) if n]),
        )
        return Histogram(self.keys[start:stop], self.counts[start:stop]).merge(ends)

    def edges(self) -> tuple[Float64s, Float64s]:
        """Return the lower and the upper edge of each bin, each float64[n]. Only the bin around zero contains values of
        both signs.
        """
        magnitude = self.keys & np.uint32(_SIGN - 1)
        inner = _magnitudes(magnitude)
        outer = _magnitudes(magnitude + np.uint32(1))
        negative = self.keys >= _SIGN
        zero = magnitude == 0
        lower = np.where(negative, -outer, np.where(zero, -outer, inner))
        upper = np.where(negative, -inner, outer)
        return lower, upper


EMPTY = Histogram(np.zeros(0, np.uint32), np.zeros(0, np.int64))


def _received(keys: NDArray[np.uint32], counts: NDArray[Any]) -> Histogram:
    return Histogram(keys, counts.astype(np.int64))


class Counter:
    """Build a histogram in a table that has one 32-bit number per key. Most of the table's memory is never touched.

    Keys are buffered until there are CHUNK of them. Without the buffer, the program would count a few keys of one
    tensor, then of the next, and no table would be in the caches. The table is created when the first buffer is full:
    reading a table takes longer than reading a few values, and a process can have only about ten thousand tables. Only
    one thread at a time may use a counter.
    """

    def __init__(self, start: Histogram = EMPTY) -> None:
        self._merged = start
        self._counts: NDArray[np.uint32] | None = None
        self._room = _MAX_COUNT
        self._waiting: NDArray[np.uint32] = np.empty(_SMALL_BUFFER, np.uint32)
        self._filled = 0
        self._weight = 1

    def add(self, values: Float32s, weight: int = 1) -> None:
        """Count at most CHUNK finite values, each `weight` times."""
        filled = self._filled + values.size
        # The buffer holds keys of one weight only, so that one call can add them all.
        if weight != self._weight or filled > CHUNK or filled * weight > _MAX_COUNT:
            self._count()
            self._weight = weight
        size = self._filled + values.size
        if size > self._waiting.size:
            grown = np.empty(min(CHUNK, 2 * size), np.uint32)
            grown[: self._filled] = self._waiting[: self._filled]
            self._waiting = grown
        waiting = self._waiting[self._filled : self._filled + values.size]
        np.right_shift(values.view(np.uint32), np.uint32(_SHIFT), out=waiting)
        self._filled += values.size

    def take(self, histogram: Histogram) -> None:
        """Add the counts of a histogram. A histogram with few bins is merged by sorting, which is faster than using a
        table.
        """
        total = histogram.total
        if histogram.keys.size <= _SMALL_BUFFER or total > _MAX_COUNT:
            self._merged = self._merged.merge(histogram)
        else:
            table = self._table(total)
            table[histogram.keys] += histogram.counts.astype(np.uint32)

    def _count(self) -> None:
        table = self._table(self._filled * self._weight)
        np.add.at(table, self._waiting[: self._filled].astype(np.intp), np.uint32(self._weight))
        self._filled = 0

    def _table(self, more: int) -> NDArray[np.uint32]:
        """Return a table in which each count can grow by `more` without overflow."""
        if self._counts is None:
            self._counts = _zeros()
        self._room -= more
        # Before any count could overflow, the table is emptied into an exact histogram.
        if self._room < 0:
            self._merged = _read_table(self._counts, -_LARGEST, _LARGEST).merge(self._merged)
            self._counts = _zeros()
            self._room = _MAX_COUNT - more
        return self._counts

    def freeze(self, minimum: float, maximum: float) -> Histogram:
        """Return the histogram so far. All values must be from `minimum` to `maximum`, because only this part of the
        table is read.
        """
        if self._counts is None:
            keys, counts = np.unique(self._waiting[: self._filled], return_counts=True)
            return _collect(keys, counts.astype(np.int64) * self._weight).merge(self._merged)
        self._count()
        return _read_table(self._counts, minimum, maximum).merge(self._merged)


def _read_table(table: NDArray[np.uint32], minimum: float, maximum: float) -> Histogram:
    """Return the histogram that a table contains, from `minimum` to `maximum`."""
    lowest_key, highest_key = (int(k) & (_SIGN - 1) for k in _keys_of(np.array([minimum, maximum], np.float32)))
    positive = table[: highest_key + 1 if maximum >= 0 else 0]
    negative = table[_SIGN : _SIGN + lowest_key + 1 if minimum <= 0 else _SIGN][::-1]
    places = np.flatnonzero(negative != 0), np.flatnonzero(positive != 0)
    keys = np.concatenate([_SIGN + lowest_key - places[0], places[1]]).astype(np.uint32)
    counts = np.concatenate([negative[places[0]], positive[places[1]]]).astype(np.int64)
    # If minus zero was counted, the bin of minus zero must still be joined with that of plus zero.
    return Histogram(keys, counts) if not table[_SIGN] else _collect(keys, counts)


def _zeros() -> NDArray[np.uint32]:
    """Return a table with a zero for each key. It is shared memory, which the memory limit of a process
    (`edgeq_device.system.budget`) does not count. Ordinary memory would count in full, 2 MiB for each tensor, even if
    it is never touched.
    """
    return np.frombuffer(mmap.mmap(-1, 4 * KEYS), np.uint32)


def histogram_of(values: NDArray[Any]) -> Histogram:
    """Return the histogram of finite float32 or float16 values of any shape.

    Raises:
        CalibrationError: a value is NaN or infinite.
    """
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if not np.isfinite(flat).all():
        raise CalibrationError("a value is NaN or infinite", "Give finite values")
    keys, counts = np.unique(_keys_of(flat), return_counts=True)
    return _collect(keys, counts.astype(np.int64))


def repeated(value: float, count: int) -> Histogram:
    """Return the histogram of one finite value that occurs `count` times."""
    return Histogram(_keys_of(np.array([value + 0.0], np.float32)), np.array([count], np.int64))


def is_sound(histogram: Histogram) -> bool:
    """Return whether a histogram from a file is valid: the keys are finite, sorted and unique, and the counts are
    positive.
    """
    keys, counts = histogram.keys, histogram.counts
    magnitude = keys & np.uint32(_SIGN - 1)
    return (
        keys.shape == counts.shape
        and bool((keys < KEYS).all())
        and bool((magnitude < _INFINITE).all())
        and bool((np.diff(order_of(keys)) > 0).all())
        and bool((counts > 0).all())
        and not bool((keys == _SIGN).any())
    )


def _collect(keys: NDArray[np.uint32], counts: Int64s) -> Histogram:
    """Sort keys and add the counts of equal keys. The bin of minus zero is joined with that of plus zero, so equal
    values are in one bin.
    """
    if not keys.size:
        return EMPTY
    # Keys of negative values rise with the magnitude, so keys alone are not in the order of the values.
    order = order_of(np.where(keys == _SIGN, np.uint32(0), keys))
    place = np.argsort(order, kind="stable")
    order = order[place]
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 1))
    return Histogram(from_order(order[starts]), np.add.reduceat(counts[place], starts))


def _keys_of(values: Float32s) -> NDArray[np.uint32]:
    return values.view(np.uint32) >> np.uint32(_SHIFT)


def order_of(keys: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Return numbers that increase with the values of the bins. The number is the key for positive bins. For negative
    bins it is minus the key without its sign bit.
    """
    signed = keys.astype(np.int32)
    return np.where(signed >= _SIGN, _SIGN - signed, signed)


def from_order(order: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Invert `order_of`: return the keys for its numbers."""
    return np.where(order < 0, _SIGN - order, order).astype(np.uint32)


def _magnitudes(keys: NDArray[np.uint32]) -> Float64s:
    """Return the value at which the bin of each key without a sign begins; 2^128 for the key of infinity."""
    values = (keys.astype(np.uint32) << np.uint32(_SHIFT)).view(np.float32).astype(np.float64)
    return np.where(keys == _INFINITE, 2.0**128, values)


_OCTAVE = 1 << MANTISSA_BITS
BINS = 4 * _OCTAVE
"""Number of linear bins on each side of zero. The window is the smallest power of two that includes the largest
magnitude, so more than 2048 bins are in use."""


@dataclass(frozen=True, eq=False)
class Linear:
    """Hold a histogram with linear bins. Exact zeros are left out, because every quantization represents them exactly.

    Attributes:
        counts: float64[2 × BINS]; bin i contains values from (i - BINS) × width to (i + 1 - BINS) × width.
        width: width of a bin, a power of two.
    """

    counts: Float64s
    width: float

    def centres(self) -> Float64s:
        """Return the centre of each bin, float64[2 × BINS]."""
        return (np.arange(2 * BINS, dtype=np.float64) - BINS + 0.5) * self.width


def linear_of(histogram: Histogram) -> Linear:
    """Convert a histogram to linear bins.

    Each bin of the histogram is inside one linear bin, except in the top octave. In the top octave, each bin covers two
    linear bins and adds half of its count to each.
    """
    keep = histogram.keys != 0
    order, counts = order_of(histogram.keys[keep]), histogram.counts[keep].astype(np.float64)
    if not counts.size:
        return Linear(np.zeros(2 * BINS), 1.0 / BINS)
    magnitude = np.abs(order)
    top = int(magnitude.max()) >> MANTISSA_BITS
    # For each bin, the index of the linear bin that contains its first value. The index is computed as in the top
    # octave, then shifted right by one bit for each octave that the bin is below it.
    leading = (magnitude & (_OCTAVE - 1)) | np.where(magnitude >= _OCTAVE, _OCTAVE, 0)
    octave = np.maximum(magnitude >> MANTISSA_BITS, 1)
    steps = np.minimum(max(top, 1) - octave, 31)
    inner = (leading * (BINS // (2 * _OCTAVE))) >> steps
    places = np.where(order < 0, BINS - 1 - inner, BINS + inner)
    split = steps == 0
    # Halves of integers are exact, so the order of additions does not matter.
    counts[split] /= 2
    neighbours = places[split] + np.where(order[split] < 0, -1, 1)
    parts = np.bincount(places, counts, 2 * BINS), np.bincount(neighbours, counts[split], 2 * BINS)
    spread = np.add(*parts, dtype=np.float64)
    return Linear(spread, 2.0 ** (max(top, 1) - 126) / BINS)


UNIT = 2.0**-149
"""The smallest float32. Sums of extrema are integers in this unit, so they are exact in any order."""


@dataclass(frozen=True, eq=False)
class ChannelExtrema:
    """Hold the exact minimum and maximum of every slice along `axis`, each float32[channels]."""

    axis: int
    minimum: NDArray[np.float32]
    maximum: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelExtrema):
            return NotImplemented
        equal_extrema = np.array_equal(self.minimum, other.minimum) and np.array_equal(self.maximum, other.maximum)
        return self.axis == other.axis and equal_extrema

    def __hash__(self) -> int:
        return hash((self.axis, self.minimum.tobytes(), self.maximum.tobytes()))

    def merge(self, extrema: ChannelExtrema) -> ChannelExtrema:
        """Return the extrema over both parts.

        Raises:
            CalibrationError: the axes or the numbers of channels differ.
        """
        if self.axis != extrema.axis or self.minimum.shape != extrema.minimum.shape:
            raise CalibrationError("the number of channels differs between samples", "Collect it per tensor")
        return ChannelExtrema(
            self.axis, np.minimum(self.minimum, extrema.minimum), np.maximum(self.maximum, extrema.maximum)
        )


@dataclass(frozen=True)
class Nonfinite:
    """Count the elements that are not finite.

    Attributes:
        nan: number of NaN elements.
        below, above: number of minus infinities, and of plus infinities.
    """

    nan: Count = 0
    below: Count = 0
    above: Count = 0

    def __add__(self, other: Nonfinite) -> Nonfinite:
        return Nonfinite(self.nan + other.nan, self.below + other.below, self.above + other.above)

    def __bool__(self) -> bool:
        return bool(self.nan or self.below or self.above)

    def __str__(self) -> str:
        return "NaN" if self.nan else "an infinity"


FINITE = Nonfinite()


@dataclass(frozen=True)
class TensorStatistics:
    """Hold the statistics of one tensor.

    Attributes:
        dtype: "float32" or "float16".
        samples: number of samples that were run.
        nonempty: number of samples in which the tensor had at least one finite element.
        count: number of finite elements. All other figures except `nonfinite` also describe only the finite elements.
        minimum, maximum: exact extrema; +inf and -inf if there were no elements. Minus zero is stored as zero.
        minimum_sum, maximum_sum: sums of the samples' minima and maxima, in units of 2^-149.
        histogram: histogram of all elements. If the tensor is very large in a sample, only an evenly spaced part is
            counted, and each counted element has the weight of the elements that it represents.
        channels: extrema per channel; None if they were not collected.
        nonfinite: numbers of elements that were NaN or infinite.
    """

    dtype: str = "float32"
    samples: int = 0
    nonempty: int = 0
    count: int = 0
    minimum: float = float("inf")
    maximum: float = float("-inf")
    minimum_sum: int = 0
    maximum_sum: int = 0
    histogram: Histogram = EMPTY
    channels: ChannelExtrema | None = None
    nonfinite: Nonfinite = FINITE

    def merge(self, statistics: TensorStatistics) -> TensorStatistics:
        """Return the statistics of both parts together. Sums and counts are exact, so the order of merging does not
        matter.

        Raises:
            CalibrationError: the element types differ, or only one part has extrema per channel.
        """
        if self.dtype != statistics.dtype:
            raise CalibrationError(f"one part has {self.dtype}, the other {statistics.dtype}")
        if (self.channels is None) != (statistics.channels is None) and self.nonempty and statistics.nonempty:
            raise CalibrationError("one part has channel extrema, the other has none", "Collect both the same way")
        # A part without elements has no extrema, and the other part's are then those of both.
        channels = self.channels or statistics.channels
        if self.channels is not None and statistics.channels is not None:
            channels = self.channels.merge(statistics.channels)
        return TensorStatistics(
            self.dtype,
            self.samples + statistics.samples,
            self.nonempty + statistics.nonempty,
            self.count + statistics.count,
            min(self.minimum, statistics.minimum),
            max(self.maximum, statistics.maximum),
            self.minimum_sum + statistics.minimum_sum,
            self.maximum_sum + statistics.maximum_sum,
            self.histogram.merge(statistics.histogram),
            channels,
            self.nonfinite + statistics.nonfinite,
        )


@dataclass(frozen=True)
class Statistics(Displayed):
    """Hold the statistics of all tensors.

    Attributes:
        model_digest, data_digest: digests of the model and the data. After a merge, the data digest consists of the
            sorted digests of the parts, joined by "+".
        samples: number of samples that every tensor has seen.
        total: number of samples to run; larger than `samples` after an interruption.
        tensors: statistics by tensor name.
    """

    model_digest: str
    data_digest: str
    samples: int
    tensors: Mapping[str, TensorStatistics]
    total: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(sorted(self.tensors.items()))))
        # Merged statistics state no total of their own.
        if self.total < self.samples:
            object.__setattr__(self, "total", self.samples)

    @property
    def complete(self) -> bool:
        """Return whether every tensor has seen all samples."""
        return self.samples == self.total and all(t.samples == self.samples for t in self.tensors.values())

    def check_model(self, digest: str, place: str) -> None:
        """Raise an error if these statistics do not belong to the model with this digest. `place` names the statistics
        in the message.

        Raises:
            CalibrationError: the statistics were collected on another model.
        """
        # Statistics that were never saved have no digest, and nothing can be compared.
        if digest and self.model_digest and digest != self.model_digest:
            raise CalibrationError(
                f"{place} was collected on another model ({self.model_digest[:12]}…, this one is {digest[:12]}…)",
                "Run `edgeq calibrate` on this model, with the same ⟨fix⟩",
            )

    def select(self, names: Iterable[str]) -> Statistics:
        """Return only the statistics of the tensors `names`."""
        selection = {}
        for name in names:
            if name not in self.tensors:
                raise UsageError(f"there are no statistics of a tensor {name!r}", "`edgeq calibrate show` lists them")
            selection[name] = self.tensors[name]
        return replace(self, tensors=selection)

    def merge(self, statistics: Statistics) -> Statistics:
        """Return the statistics of both parts together. Merging is associative and commutative to the last bit.

        Raises:
            CalibrationError: the models or tensors differ, the data are the same, or a part is unfinished.
        """
        if self.model_digest != statistics.model_digest:
            raise CalibrationError("the parts were collected on different models", "Merge parts of one model")
        if self.tensors.keys() != statistics.tensors.keys():
            name = min(self.tensors.keys() ^ statistics.tensors.keys())
            raise CalibrationError(f"tensor {name!r} is only in one of the parts", "Collect the same tensors in both")
        if not (self.complete and statistics.complete):
            raise CalibrationError("one of the parts is unfinished", "Finish it with ⟨resume=True⟩, then merge")
        # Statistics that were merged before contain the data of several parts. No part may count twice.
        mine, theirs = (set(s.data_digest.split("+")) - {""} for s in (self, statistics))
        if mine & theirs:
            raise CalibrationError("both parts contain the same data", "Merge each part once")
        tensors = {}
        for name, tensor in self.tensors.items():
            try:
                tensors[name] = tensor.merge(statistics.tensors[name])
            except CalibrationError as error:
                raise CalibrationError(f"tensor {name!r}: {error.problem}", error.fix) from error
        return Statistics(
            self.model_digest, "+".join(sorted(mine | theirs)), self.samples + statistics.samples, tensors
        )


def in_units(value: float) -> int:
    """Return a float32 value as an exact integer multiple of 2^-149."""
    return int(value / UNIT)


def mean_of_units(total: int, count: int) -> float:
    """Return the mean of `count` values whose sum is `total` units. Only the final division rounds."""
    # An integer division keeps all digits of the sum, which a float64 could not hold.
    quotient, remaining = divmod(total, count)
    return (float(quotient) + remaining / count) * UNIT
