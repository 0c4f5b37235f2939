"""What one float32 pass over the samples saw, as a value that merges exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgeq.calibrate.histogram import EMPTY, Histogram
from edgeq.errors import CalibrationError, UsageError
from edgeq.util.display import Displayed

UNIT = 2.0**-149
"""The smallest float32. Sums of extrema are integers in this unit, so that adding them is exact and order-free."""


@dataclass(frozen=True, eq=False)
class ChannelExtrema:
    """Exact minimum and maximum of every slice along `axis`, float32[channels] each."""

    axis: int
    minimum: NDArray[np.float32]
    maximum: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelExtrema):
            return NotImplemented
        same = np.array_equal(self.minimum, other.minimum) and np.array_equal(self.maximum, other.maximum)
        return self.axis == other.axis and same

    def __hash__(self) -> int:
        return hash((self.axis, self.minimum.tobytes(), self.maximum.tobytes()))

    def merge(self, other: ChannelExtrema) -> ChannelExtrema:
        """The extrema of both parts together.

        Raises:
            CalibrationError: they have different axes or numbers of channels.
        """
        if self.axis != other.axis or self.minimum.shape != other.minimum.shape:
            raise CalibrationError("the number of channels differs between samples", "Collect it per tensor")
        return ChannelExtrema(
            self.axis, np.minimum(self.minimum, other.minimum), np.maximum(self.maximum, other.maximum)
        )


@dataclass(frozen=True)
class Nonfinite:
    """Counts of the elements that were not finite.

    Attributes:
        nan: NaN.
        below, above: minus and plus infinity.
    """

    nan: int = 0
    below: int = 0
    above: int = 0

    def __add__(self, other: Nonfinite) -> Nonfinite:
        return Nonfinite(self.nan + other.nan, self.below + other.below, self.above + other.above)

    def __bool__(self) -> bool:
        return bool(self.nan or self.below or self.above)

    def __str__(self) -> str:
        return "NaN" if self.nan else "an infinity"


FINITE = Nonfinite()


@dataclass(frozen=True)
class TensorStatistics:
    """What is known of one tensor.

    Attributes:
        dtype: "float32" or "float16".
        samples: samples that were run.
        nonempty: samples in which the tensor had at least one finite element.
        count: finite elements seen; all figures but `nonfinite` are of these.
        minimum, maximum: exact extrema; +inf and -inf while nothing was seen. Minus zero is stored as zero.
        minimum_sum, maximum_sum: sums over samples of the extrema of each sample, in units of 2^-149.
        histogram: every element, or of a tensor that is very large in one sample an evenly spread part, each counted
            for as many as it stands for.
        channels: extrema per channel where they were collected.
        nonfinite: the elements that were NaN or infinite.
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

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """The statistics of both parts together; sums and counts are exact, so the order of merging does not matter.

        Raises:
            CalibrationError: their element types differ, or only one has extrema per channel.
        """
        if self.dtype != other.dtype:
            raise CalibrationError(f"one part has {self.dtype}, the other {other.dtype}")
        if (self.channels is None) != (other.channels is None) and self.nonempty and other.nonempty:
            raise CalibrationError("one part has channel extrema, the other has none", "Collect both the same way")
        channels = self.channels or other.channels
        if self.channels is not None and other.channels is not None:
            channels = self.channels.merge(other.channels)
        return TensorStatistics(
            self.dtype,
            self.samples + other.samples,
            self.nonempty + other.nonempty,
            self.count + other.count,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.minimum_sum + other.minimum_sum,
            self.maximum_sum + other.maximum_sum,
            self.histogram.merge(other.histogram),
            channels,
            self.nonfinite + other.nonfinite,
        )


@dataclass(frozen=True)
class Statistics(Displayed):
    """What one pass observed of all tensors.

    Attributes:
        model_digest, data_digest: of what they were collected on; a merged one has its parts' data digests, sorted
            and joined by "+".
        samples: samples run, for every tensor.
        total: samples that were to be run; more than `samples` after an interruption.
        tensors: by name.
    """

    model_digest: str
    data_digest: str
    samples: int
    tensors: Mapping[str, TensorStatistics]
    total: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(sorted(self.tensors.items()))))
        if self.total < self.samples:
            object.__setattr__(self, "total", self.samples)

    @property
    def complete(self) -> bool:
        """Whether all samples were run, for each tensor."""
        return self.samples == self.total and all(t.samples == self.samples for t in self.tensors.values())

    def check_model(self, digest: str, place: str) -> None:
        """Refuse these statistics for another model than theirs; `place` names them in the message."""
        if digest and self.model_digest and digest != self.model_digest:
            raise CalibrationError(
                f"{place} was collected on another model ({self.model_digest[:12]}…, this one is {digest[:12]}…)",
                "Run `edgeq calibrate` on this model, with the same --fix",
            )

    def select(self, names: Iterable[str]) -> Statistics:
        """These statistics for some tensors only."""
        chosen = {}
        for name in names:
            if name not in self.tensors:
                raise UsageError(f"there are no statistics of a tensor {name!r}", "`edgeq calibrate show` lists them")
            chosen[name] = self.tensors[name]
        return replace(self, tensors=chosen)

    def merge(self, other: Statistics) -> Statistics:
        """Both parts together; associative and commutative to the last bit.

        Raises:
            CalibrationError: another model, other tensors, the same data twice, or an unfinished part.
        """
        if self.model_digest != other.model_digest:
            raise CalibrationError("the parts were collected on different models", "Merge parts of one model")
        if self.tensors.keys() != other.tensors.keys():
            name = min(self.tensors.keys() ^ other.tensors.keys())
            raise CalibrationError(f"tensor {name!r} is only in one of the parts", "Collect the same tensors in both")
        if not (self.complete and other.complete):
            raise CalibrationError("one of the parts is unfinished", "Finish it with --resume, then merge")
        mine, theirs = (set(s.data_digest.split("+")) - {""} for s in (self, other))
        if mine & theirs:
            raise CalibrationError("both parts hold the same data", "Merge each part once")
        tensors = {}
        for name, tensor in self.tensors.items():
            try:
                tensors[name] = tensor.merge(other.tensors[name])
            except CalibrationError as error:
                raise CalibrationError(f"tensor {name!r}: {error.problem}", error.fix) from error
        return Statistics(self.model_digest, "+".join(sorted(mine | theirs)), self.samples + other.samples, tensors)


def in_units(value: float) -> int:
    """A float32 value as an exact integer multiple of 2^-149."""
    return int(value / UNIT)


def mean_of_units(total: int, count: int) -> float:
    """The mean of `count` values whose sum is `total` units, correctly rounded but for the last division."""
    whole, remaining = divmod(total, count)
    return (float(whole) + remaining / count) * UNIT
