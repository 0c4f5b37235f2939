"""What tuning found, as values that become the tuning record: plain JSON, keys as docs/tune.md lists them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeq.records import NullIsInfinite, plain
from edgeq.tune.candidate import Candidate

SCHEMA = "edgeq.tuning/1"

Stage = Literal["space", "recovery", "exclusion", "threads"]
Status = Literal["chosen", "qualified", "short", "eliminated"]
Basis = Literal["labels", "agreement"]


@dataclass(frozen=True)
class Screening:
    """What the cheap filters found of a candidate that was built.

    Attributes:
        bytes: on disk, external data included.
        structure: hash of the graph without the values of scales and weights: the same structure, the same speed.
        content: hash of the file: the same content, the same model.
        int8_mac_share: of the multiply-accumulates, after the runtime's optimisation.
        sqnr_db: of the worst output against float32 on a few samples; infinity where all is equal.
        build_s: seconds that building took.
    """

    bytes: int
    structure: str
    content: str
    int8_mac_share: float
    sqnr_db: NullIsInfinite
    build_s: float = 0.0


@dataclass(frozen=True)
class Assessment:
    """Accuracy of a candidate against float32 on the first `samples` of the validation samples.

    Attributes:
        samples: how many it rests on; rows of gathered batches counted singly.
        complete: whether that is all of them.
        basis: "labels", or "agreement" where there are none.
        drop: what the basis measures: the loss in the task's primary metric; without labels see docs/tune.md.
        low, high: 95 % confidence interval of `drop`.
        expected: the best estimate of the loss on samples not seen; equal to `drop` where nothing better is known.
        doubt: standard error of `expected`; 0 where nothing better than `drop` is known.
        metrics: the task's, by name; empty without labels.
        disagreement: share of rows whose top-1 differs from float32's: no loss of top-1 can be larger. None where the
            outputs are no class scores.
        sqnr_db, cosine: of the worst output.
    """

    samples: int
    complete: bool
    basis: Basis
    drop: float
    low: float
    high: float
    expected: float
    doubt: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    disagreement: float | None = None
    sqnr_db: NullIsInfinite = math.inf
    cosine: float = 1.0

    @property
    def loss(self) -> float:
        """What is held against the bar: the worse of what was measured and what is to be expected, doubt included."""
        return max(self.drop, self.expected + self.doubt)


@dataclass(frozen=True)
class Timing:
    """Latency of one structure with one number of threads, in milliseconds, and its ratio to float32's best.

    Attributes:
        latency: count, min_ms, p50_ms, p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv, samples_per_s.
        speedup: how many times faster than float32: estimate, low, high, confidence, pairs. None for float32 itself.
    """

    latency: Mapping[str, float]
    speedup: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Trial:
    """One candidate and all that became known of it.

    Attributes:
        stage: where it came from.
        parent: the candidate that it was made from; "" in the space.
        status: "chosen"; "qualified" (met the bar, but was not the best); "short" (measured, below the bar);
            "eliminated" (dropped before it was measured in full).
        reason: why it was not chosen, or why it was.
        pareto: no other candidate is at least as fast and as accurate, and better in one.
        memory_bytes: peak of its session, where the objective asked for it.
    """

    candidate: Candidate
    stage: Stage = "space"
    parent: str = ""
    screening: Screening | None = None
    assessment: Assessment | None = None
    timing: Timing | None = None
    memory_bytes: int | None = None
    status: Status = "eliminated"
    reason: str = ""
    pareto: bool = False

    @property
    def name(self) -> str:
        return self.candidate.name

    def replace(self, **changes: Any) -> Trial:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def __record__(self) -> dict[str, Any]:
        return {
            **plain(self.candidate),
            "stage": self.stage,
            "parent": self.parent,
            "status": self.status,
            "reason": self.reason,
            "pareto": self.pareto,
            "screening": self.screening,
            "accuracy": self.assessment,
            "timing": self.timing,
            "memory_bytes": self.memory_bytes,
        }


@dataclass(frozen=True)
class StageTime:
    """What one stage took."""

    name: str
    seconds: float
    entered: int
    left: int


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        trials: all candidates, in the order in which they were made.
        chosen: name of the winner; "" where nothing qualified.
        baseline: float32's timing, with the threads that suit it best.
        baseline_threads: those threads.
        stages: what took how long.
        settled: whether the order of the finalists is statistically settled.
        out_of_time: whether the budget ended the search.
        histograms: {"edges_ms": [...], "counts": {name: [...]}} of the finalists and float32.
    """

    trials: tuple[Trial, ...]
    chosen: str
    baseline: Timing | None
    baseline_threads: int = 0
    stages: tuple[StageTime, ...] = ()
    settled: bool = True
    out_of_time: bool = False
    histograms: Mapping[str, Any] = field(default_factory=dict)

    def trial(self, name: str) -> Trial:
        return next(t for t in self.trials if t.name == name)

    @property
    def winner(self) -> Trial | None:
        return self.trial(self.chosen) if self.chosen else None

    def __record__(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen or None,
            "candidates": self.trials,
            "baseline": self.baseline,
            "baseline_threads": self.baseline_threads,
            "stages": self.stages,
            "settled": self.settled,
            "out_of_time": self.out_of_time,
            "histograms": self.histograms,
        }
