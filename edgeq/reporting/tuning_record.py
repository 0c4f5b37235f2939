"""Define the record of a tuning run, which `edgeq tune` writes and the report reads. docs/tune.md lists the keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from edgeq_device.measure.claim import UNKNOWN, Claim

from edgeq.run.engines import DEFAULT
from edgeq.util.records import Amount, Count, Finite, NullIsInfinite, Positive, Share, computed

SCHEMA = "edgeq.tuning/1"
_NINE_OF_TEN = 1.2816  # one-sided 90 % quantile of the normal distribution
_AS_MANY = _NINE_OF_TEN * math.sqrt(2)  # factor for the difference between two equally uncertain sets of samples
_SURE = 1.96  # two-sided 95 % quantile of the normal distribution

Stage = Literal["space", "recovery", "exclusion", "threads"]
Status = Literal["chosen", "qualified", "short", "eliminated"]
Basis = Literal["labels", "agreement", "noise"]

FLOAT = "float32"
MOST_CANDIDATES = 300
"""The maximum number of candidates that are drawn."""
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32. Their value for float32 itself is 1."""
# Marks by status. A candidate with any other status is behind the front.
_DRAWN = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow", FLOAT: FLOAT}


@dataclass(frozen=True)
class Screening:
    """Record the results of the cheap checks of a candidate that was built.

    Attributes:
        bytes: the size on disk, external data included.
        structure: a hash of the graph without the values of scales and weights. Candidates with the same structure have
            the same speed.
        content: a hash of the file. Candidates with the same content are the same model.
        int8_mac_share: the share of the multiply-accumulates in int8, after the runtime's optimisation.
        wide_share: the share of the activations' elements that are in 16 bits.
        sqnr_db: the SQNR of the worst output against float32 on a few samples; infinity if all outputs are identical.
        build_s: the time of the build in seconds.
    """

    bytes: Count
    structure: str
    content: str
    int8_mac_share: Share
    sqnr_db: NullIsInfinite
    build_s: float = 0.0
    wide_share: Share = 0.0


@dataclass(frozen=True)
class Assessment:
    """Hold the accuracy of a candidate against float32 on the first `samples` of the validation samples.

    Attributes:
        samples: the number of samples. Each row of a gathered batch counts as a sample.
        complete: True if these are all the validation samples.
        basis: "labels" if there are labels. Without labels, it is "noise" in a repair, otherwise "agreement".
        drop: with labels, the loss in the task's primary metric. For the other values of `basis`, see docs/tune.md.
        low, high: the 95 % confidence interval of `drop`.
        expected: the best estimate of the loss on other samples; equal to `drop` if no better estimate is known.
        doubt: the standard error of `expected`. It is 0 if it is not known or not needed: if there are hardly any
            samples, if outputs are compared by their cosine, or if only the loss on these samples matters.
        metrics: the task's metrics by name; empty without labels.
        disagreement: the share of rows whose top-1 differs from that of float32. The loss of top-1 cannot be larger
            than this share. It is None if the outputs are not class scores.
        sqnr_db, cosine: the figures of the worst output.
    """

    samples: Count
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

    @computed
    def bound(self) -> float:
        """Return the loss that is compared with the allowed loss. With a probability above 90 %, the model's loss over
        many other samples is not larger than this bound. The bound is never less than the loss on these samples.
        """
        # An estimate never promises less than the loss that was measured.
        return max(self.drop, self.expected + _AS_MANY * self.doubt)

    @computed
    def prediction_bound(self) -> float:
        """Return the limit of the one-sided 90 % prediction interval for the loss on the same number of other samples.
        The interval includes the random variation of those samples.

        The limit is equal to `bound` if only labels are known, or if the uncertainty is unknown. It is larger than
        `bound` if `expected` is more certain than the loss on that many samples can be.
        """
        if not self.doubt:
            return self.bound
        error = (self.high - self.low) / (2 * _SURE)
        return max(self.bound, self.expected + _NINE_OF_TEN * math.hypot(self.doubt, error))

    def least_bound(self, share: float) -> float:
        """Return a value that `bound` on all samples will not fall below, with a certainty of 97.5 %. `share` is the
        share of all samples that this assessment uses.

        Let e be the standard error of the mean over a share s of the samples. The mean over all samples differs from
        that mean by e times sqrt(1 - s). The doubt on all samples is the doubt on the share times sqrt(s).
        """
        moves = math.sqrt(1 - share)
        bound = self.drop - (self.drop - self.low) * moves if self.high - self.low < 1 else self.low
        shrunk = _AS_MANY * math.sqrt(share) - _SURE * moves
        return max(bound, self.expected + shrunk * self.doubt) if self.doubt else bound


@dataclass(frozen=True)
class StructureTiming:
    """Hold the latency of one structure with one number of threads, in milliseconds, and its ratio to the best latency
    of float32.

    Attributes:
        latency: figures of the undisturbed runs, or of all runs if every run was disturbed: count, min_ms, p50_ms,
            p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv, samples_per_s.
        speedup: the claim that can be made about the speed against float32, timed in the same series of runs; None for
            float32 itself.
        float_ms: the median latency of float32 in that series; None for float32 itself.
    """

    latency: Mapping[str, float]
    speedup: Claim | None = None
    float_ms: float | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict on the candidate's speed against float32, or "unknown" if the two were not timed against
        each other.
        """
        return self.speedup.verdict if self.speedup is not None else UNKNOWN

    @property
    def share(self) -> float:
        """Return the median latency divided by that of float32 in the same series of runs. If this ratio cannot be
        claimed, return its estimate. Return 1 if there is no timing against float32.
        """
        about = self.speedup.estimated if self.speedup is not None else None
        if about is not None:
            return 1 / about[0]
        return self.latency["p50_ms"] / self.float_ms if self.float_ms else 1.0


@dataclass(frozen=True)
class StageTime:
    """Record the time that one stage took."""

    name: str
    seconds: float
    entered: Count
    left: Count


@dataclass(frozen=True)
class TrialRecord:
    """Describe how one candidate was made, and its results. See `edgeq.tuning.trials.Trial`.

    Attributes:
        status: a `Status`, or "float32" for the baseline.
        reason: the reason why the candidate was not chosen.
    """

    name: str
    scheme: Mapping[str, Any] = field(default_factory=dict)
    recoveries: tuple[str, ...] = ()
    threads: Count = 0
    builder: str = ""
    engine: str = ""
    precision: str = ""
    stage: str = ""
    parent: str = ""
    status: str = ""
    reason: str = ""
    pareto: bool = False
    screening: Screening | None = None
    accuracy: Assessment | None = None
    timing: StructureTiming | None = None
    memory_bytes: Count | None = None

    @property
    def mark(self) -> str:
        """Return the mark to draw: "chosen", "front", "behind", "short" (of accuracy), "slow" (slower than float32),
        "dropped" or "float32".
        """
        status = _DRAWN.get(self.status, "behind")
        return "front" if self.pareto and status != "chosen" else status

    @property
    def latency_ms(self) -> float | None:
        """Return the median latency in milliseconds, or None if the candidate was not timed."""
        value = self.timing.latency.get("p50_ms", 0.0) if self.timing is not None else 0.0
        # The record may be untrusted, and charts take logarithms of latencies.
        return value if 0 < value < 1e200 else None

    @property
    def partial(self) -> bool:
        """Return whether the candidate's accuracy is known only on part of the samples. If so, it cannot be compared
        with the accuracy of other candidates.
        """
        return self.accuracy is not None and not self.accuracy.complete

    @property
    def plugin(self) -> str:
        """Return the engine that runs the candidate, or "" for onnxruntime's own kernels."""
        return self.engine if self.engine != DEFAULT else ""


@dataclass(frozen=True)
class ModelRecord:
    """Describe the float32 model: its name, digest and size in bytes."""

    name: str = ""
    sha256: str | None = None
    bytes: Positive | None = None


@dataclass(frozen=True)
class MetricRecord:
    """Name the metric by which accuracy is measured."""

    name: str = "accuracy"
    higher_is_better: bool = True


@dataclass(frozen=True)
class GoalRecord:
    """Hold the goal of the run. `max_drop` is a fraction in the unit of the metric."""

    objective: str = ""
    max_drop: Finite | None = None
    budget_s: Amount | None = None


@dataclass(frozen=True)
class FloatRecord:
    """Hold the figures of float32 with its best number of threads."""

    accuracy: Mapping[str, Finite] = field(default_factory=dict)
    timing: StructureTiming | None = None
    threads: Count = 0
    bytes: Positive | None = None


@dataclass(frozen=True)
class HistogramsRecord:
    """Hold the latency histograms of the finalists and float32, as queries per bin."""

    edges_ms: tuple[Finite, ...] = ()
    counts: Mapping[str, tuple[Amount, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TuningRecord:
    """Hold the whole tuning record.

    Attributes:
        chosen: the name of the chosen candidate. It is None if no candidate was chosen, and "" if this is not recorded.
        goal_met: True if the chosen candidate meets the goal; None if this is not recorded.
        doubts: reasons why it is not certain that the goal is met.
    """

    schema: str = SCHEMA
    model: ModelRecord = ModelRecord()
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    goal: GoalRecord = GoalRecord()
    metric: MetricRecord = MetricRecord()
    elapsed_s: Amount | None = None
    verdict: tuple[str, ...] = ()
    goal_met: bool | None = None
    doubts: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    float32: FloatRecord = FloatRecord()
    chosen: str | None = ""
    fallback: str | None = None
    candidates: tuple[TrialRecord, ...] = ()
    settled: bool | None = None
    out_of_time: bool = False
    histograms: HistogramsRecord = HistogramsRecord()

    @property
    def met(self) -> bool | None:
        """Return whether a candidate meets the goal, or None if this is not recorded."""
        if self.goal_met is not None:
            return self.goal_met
        # Older records have no `goal_met`. There, a run that chose a candidate has met its goal.
        return None if self.chosen == "" else self.chosen is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentences of the verdict, and sentences on what would be needed to meet the goal."""
        return (*self.verdict[:12], *self.needed[:12])

    @cached_property
    def drawn(self) -> tuple[TrialRecord, ...]:
        """Return float32 and at most `MOST_CANDIDATES` candidates, which include the chosen one and the front.

        A candidate's `pareto` is True if the candidate is on the front of the drawn figures. This means that no other
        candidate is better in speed and at least as accurate, or better in accuracy and at least as fast. The run's own
        front uses bounds, which are not drawn.
        """
        trials = self._with_front()
        # Importance decides which candidates are drawn, and the record in which order.
        order = sorted(range(len(trials)), key=lambda i: (trials[i].status != "chosen", not trials[i].pareto))
        baseline = TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing)
        return (baseline, *(trials[i] for i in sorted(order[:MOST_CANDIDATES])))

    def _with_front(self) -> tuple[TrialRecord, ...]:
        """Return the candidates, with `pareto` set according to the drawn latency and accuracy. The comparison includes
        float32.
        """
        trials = (TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing), *self.candidates)
        figures = [(self.latency_of(trial), self.accuracy_of(trial)) for trial in trials]
        # In order of latency, a candidate is on the front if it is more accurate than all faster ones.
        front, best_worse = set(), math.inf
        for _, worse, i in sorted(
            (ms, -self._sign * value, i)
            for i, (ms, value) in enumerate(figures)
            if ms is not None and value is not None
        ):
            if worse < best_worse and not trials[i].partial:
                best_worse = worse
                front.add(i)
        return tuple(replace(trial, pareto=i in front) for i, trial in enumerate(self.candidates, 1))

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the plug-in engines of the candidates that are drawn."""
        return tuple(dict.fromkeys(trial.plugin for trial in self.drawn if trial.plugin))

    @property
    def least_accuracy(self) -> float | None:
        """Return the minimum accuracy that the goal allows, in the unit of the metric, or None if the goal has no such
        limit.
        """
        base, drop = self._base, self.goal.max_drop
        return None if base is None or drop is None else base - self._sign * drop

    def latency_of(self, trial: TrialRecord) -> float | None:
        """Return a candidate's median latency in milliseconds. The result is the candidate's ratio to float32 in its
        own series of runs, multiplied by the latency of float32. So candidates from different series are comparable
        even if the machine became slower in between.
        """
        base = self.float32.timing.latency.get("p50_ms") if self.float32.timing is not None else None
        # Without a timing of float32 in the same series, there is no ratio to apply.
        if trial.latency_ms is None or not base or trial.timing is None or trial.timing.float_ms is None:
            return trial.latency_ms
        return base * trial.timing.share

    def accuracy_of(self, trial: TrialRecord) -> float | None:
        """Return a candidate's value of the metric. If the candidate was measured on part of the samples, compute the
        value from its loss, because float32 has a different value on that part.
        """
        accuracy, base = trial.accuracy, self._base
        if trial.status == FLOAT:
            return base
        if accuracy is None:
            return None
        if self.metric.name in accuracy.metrics and accuracy.complete:
            return accuracy.metrics[self.metric.name]
        return None if base is None else base - self._sign * accuracy.drop

    def bytes_of(self, trial: TrialRecord) -> float | None:
        """Return the size in bytes of a candidate or of float32, or None if it is not known."""
        if trial.status == FLOAT:
            return self.float32.bytes
        return trial.screening.bytes if trial.screening else None

    @property
    def _base(self) -> float | None:
        """Return the value of the metric for float32."""
        return self.float32.accuracy.get(self.metric.name, 1.0 if self.metric.name in _AGAINST_FLOAT else None)

    @property
    def _sign(self) -> float:
        return 1.0 if self.metric.higher_is_better else -1.0
