"""A set of latencies and its statistics: percentiles, mean, variation, throughput, a histogram."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Sequence

import numpy as np

_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 40


def percentile(ordered: np.ndarray, fraction: float) -> float:
    """The latency at 0-based position floor(fraction x n) of n latencies in ascending order.

    This is MLPerf LoadGen's definition: a latency that was really observed, never an interpolation, and never
    smaller than a share `fraction` of the others. With n <= 1 / (1 - fraction) it is the largest one.

    Raises:
        ValueError: no latencies.
    """
    if len(ordered) == 0:
        raise ValueError("no latencies to take a percentile of")
    # 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996: nudge before rounding down.
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered) + 1e-9))])


@dataclass(frozen=True, eq=False)
class Distribution:
    """Latencies of one runner, in the order in which they were measured.

    Attributes:
        samples_ms: float64[n], n >= 1: milliseconds of each query.
        rounds: int64[r]: position in `samples_ms` at which each round of interleaving starts; rounds[0] is 0.
            Runners measured together have the same rounds, which is what pairs them. Default: a round a query.
        samples_per_query: how many model samples one query runs.
        elapsed_s: wall-clock seconds that the throughput refers to; default: the sum of the latencies.
        disturbed: bool[n]: runs during which a thread of the process waited for a core; empty where that is not known.
        busy: share of the machine's time that others used or wanted meanwhile, 0 to 1; 0 where that is not known.
        sessions: round i ran in session i modulo this.
        stolen: of `busy`, the share that a virtual machine's host took.
    """

    samples_ms: np.ndarray
    rounds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    samples_per_query: int = 1
    elapsed_s: float = 0.0
    disturbed: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    busy: float = 0.0
    sessions: int = 1
    stolen: float = 0.0
    _ordered: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        samples = np.asarray(self.samples_ms, np.float64)
        if samples.ndim != 1 or samples.size == 0:
            raise ValueError("a distribution needs a list of at least one latency")
        if not np.all(np.isfinite(samples)) or samples.min() < 0:
            raise ValueError("latencies must be finite and not negative")
        rounds = np.asarray(self.rounds, np.int64)
        if rounds.size == 0:
            rounds = np.arange(samples.size, dtype=np.int64)
        if rounds[0] != 0 or rounds[-1] >= samples.size or np.any(np.diff(rounds) <= 0):
            raise ValueError("rounds must start at 0 and rise within the latencies")
        disturbed = np.asarray(self.disturbed, bool)
        if disturbed.size not in (0, samples.size):
            raise ValueError("there must be as many marks of disturbance as latencies")
        object.__setattr__(self, "disturbed", disturbed)
        object.__setattr__(self, "samples_ms", samples)
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "elapsed_s", self.elapsed_s or float(samples.sum()) / 1e3)
        object.__setattr__(self, "_ordered", np.sort(samples))

    @property
    def count(self) -> int:
        """The number of latencies: queries, not model samples."""
        return int(self.samples_ms.size)

    @property
    def p50(self) -> float:
        """The median latency in milliseconds, by `percentile`: observed, not interpolated."""
        return percentile(self._ordered, 0.5)

    @property
    def p90(self) -> float:
        """The latency in milliseconds that 90 % of the queries do not exceed."""
        return percentile(self._ordered, 0.9)

    @property
    def p99(self) -> float:
        """The latency in milliseconds that 99 % of the queries do not exceed."""
        return percentile(self._ordered, 0.99)

    @property
    def p999(self) -> float:
        """The latency in milliseconds that 99.9 % of the queries do not exceed."""
        return percentile(self._ordered, 0.999)

    @property
    def mean(self) -> float:
        """Arithmetic mean of the latencies in milliseconds."""
        return float(self.samples_ms.mean())

    @property
    def minimum(self) -> float:
        """The shortest latency in milliseconds."""
        return float(self._ordered[0])

    @property
    def maximum(self) -> float:
        """The longest latency in milliseconds."""
        return float(self._ordered[-1])

    @property
    def cv(self) -> float:
        """Coefficient of variation: population standard deviation over the mean; 0 where the mean is 0."""
        return float(self.samples_ms.std() / self.mean) if self.mean > 0 else 0.0

    @property
    def throughput(self) -> float:
        """Model samples a second; 0 where no time passed."""
        return self.count * self.samples_per_query / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def share_over(self, bound_ms: float) -> float:
        """The share of queries slower than `bound_ms`, 0 to 1."""
        return float(np.count_nonzero(self.samples_ms > bound_ms)) / self.count

    @property
    def disturbed_share(self) -> float:
        """The share of queries that were disturbed, 0 to 1; 0 where that is not known."""
        return float(self.disturbed.mean()) if self.disturbed.size else 0.0

    def undisturbed(self) -> Distribution:
        """The queries that nothing disturbed; all where there are none, or none is known to be so."""
        if not 0 < self.disturbed_share < 1:
            return self
        left = self.samples_ms[~self.disturbed]
        return Distribution(left, samples_per_query=self.samples_per_query, busy=self.busy, stolen=self.stolen)

    def round_medians(self) -> np.ndarray:
        """float64[r]: the median latency of each round, milliseconds, without disturbed queries; NaN if all are."""
        samples = np.where(self.disturbed, np.nan, self.samples_ms) if self.disturbed.size else self.samples_ms
        ends = np.append(self.rounds[1:], self.count)
        if np.all(ends - self.rounds == 1):
            return samples
        return np.array([_median(samples[a:b]) for a, b in zip(self.rounds, ends)])

    def to_dict(self) -> Dict[str, float]:
        """The figures under stable names; latencies in milliseconds, throughput in samples a second."""
        return {
            "count": self.count,
            "min_ms": self.minimum,
            "p50_ms": self.p50,
            "p90_ms": self.p90,
            "p99_ms": self.p99,
            "p999_ms": self.p999,
            "max_ms": self.maximum,
            "mean_ms": self.mean,
            "cv": self.cv,
            "samples_per_s": self.throughput,
        }


def _median(samples: np.ndarray) -> float:
    known = samples[~np.isnan(samples)]
    return float(np.median(known)) if known.size else float("nan")


def shared_edges(distributions: Sequence[Distribution]) -> np.ndarray:
    """float64[41]: histogram edges, evenly spaced in log(milliseconds), from the least to the greatest p99.9."""
    low = max(min(d.minimum for d in distributions), 1e-6)
    high = max(max(d.p999 for d in distributions), low * 1.01)
    return np.geomspace(low, high, _BINS + 1)


def histogram(distribution: Distribution, edges: np.ndarray) -> List[int]:
    """How many latencies lie between successive `edges`; what lies beyond an end counts in the bin at that end."""
    counts, _ = np.histogram(np.clip(distribution.samples_ms, edges[0], edges[-1]), edges)
    return [int(c) for c in counts]


def sparkline(counts: Sequence[int]) -> str:
    """One character a bin, its height by the share of the fullest bin; a bin that is not empty is never blank."""
    top = max(counts) if len(counts) else 0
    return "".join(" " if c == 0 else _BARS[max(1, round(8 * c / top))] for c in counts)
