"""Define the record of a tuning run, as `edgeq tune` writes it and the report reads it. Keys: docs/tune.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from edgeq_device.claim import UNKNOWN, Claim

from edgeq.run.engines import DEFAULT
from edgeq.util.records import Amount, Count, Finite, NullIsInfinite, Positive, Share, computed

SCHEMA = "edgeq.tuning/1"
_NINE_OF_TEN = 1.2816  # one-sided 90 % of the normal distribution
_AS_MANY = _NINE_OF_TEN * math.sqrt(2)  # for the difference of two sets of samples: both are as uncertain
_SURE = 1.96  # two-sided 95 % of the normal distribution

Stage = Literal["space", "recovery", "exclusion", "threads"]
Status = Literal["chosen", "qualified", "short", "eliminated"]
Basis = Literal["labels", "agreement", "noise"]

FLOAT = "float32"
MOST_CANDIDATES = 300
"""More than these are not drawn."""
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32, which by nature has 1."""
_DRAWN = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow", FLOAT: FLOAT}


@dataclass(frozen=True)
class Screening:
    """Record what the cheap filters found of a candidate that was built.

    Attributes:
        bytes: on disk, external data included.
        structure: hash of the graph without the values of scales and weights: the same structure, the same speed.
        content: hash of the file: the same content, the same model.
        int8_mac_share: of the multiply-accumulates, after the runtime's optimisation.
        wide_share: of the bytes of activations, were all in 8 bits: what is in 16.
        sqnr_db: of the worst output against float32 on a few samples; infinity where all is equal.
        build_s: seconds that building took.
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
        samples: how many it rests on; rows of gathered batches counted singly.
        complete: whether that is all of them.
        basis: "labels"; where there are none "agreement", or "noise" where a repair looks for healthy outputs.
        drop: what the basis measures: the loss in the task's primary metric; without labels see docs/tune.md.
        low, high: 95 % confidence interval of `drop`.
        expected: the best estimate of the loss on samples not seen; equal to `drop` where nothing better is known.
        doubt: standard error of `expected`; 0 where it is not known: there are hardly any samples, or outputs that are
            compared by their cosine, or the loss on the samples themselves was in question.
        metrics: the task's, by name; empty without labels.
        disagreement: share of rows whose top-1 differs from float32's: no loss of top-1 can be larger. None where the
            outputs are not a class scores.
        sqnr_db, cosine: of the worst output.
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
        """Return the bound that is compared with the loss allowed: what the model loses over many other samples,
        with more than nine chances of ten; and no less than what these samples show.
        """
        return max(self.drop, self.expected + _AS_MANY * self.doubt)

    @computed
    def prediction_bound(self) -> float:
        """Return the limit of the one-sided prediction interval: by nine chances of ten the loss on as many other
        samples is not larger, chance on those included. It is `bound` where labels alone are known, and more where
        `expected` is surer than the loss on as many samples can be. Where the uncertainty is not known it is
        `bound`.
        """
        if not self.doubt:
            return self.bound
        error = (self.high - self.low) / (2 * _SURE)
        return max(self.bound, self.expected + _NINE_OF_TEN * math.hypot(self.doubt, error))

    def least_bound(self, share: float) -> float:
        """Return what `bound` will at least be on all samples, of which this rests on the `share`: 97.5 % sure.

        A mean over a share s of some samples differs from that over all of them by its standard error times
        sqrt(1 - s); the doubt on all of them is that on the share times sqrt(s).
        """
        moves = math.sqrt(1 - share)
        least = self.drop - (self.drop - self.low) * moves if self.high - self.low < 1 else self.low
        shrunk = _AS_MANY * math.sqrt(share) - _SURE * moves
        return max(least, self.expected + shrunk * self.doubt) if self.doubt else least


@dataclass(frozen=True)
class Timing:
    """Hold the latency of one structure with one number of threads, in milliseconds, and its ratio to float32's best.

    Attributes:
        latency: of the runs that nothing disturbed (of all where there are none): count, min_ms, p50_ms, p90_ms,
            p99_ms, p999_ms, max_ms, mean_ms, cv, samples_per_s.
        speedup: what can be claimed of its speed against float32's in the same race. None for float32 itself.
        float_ms: float32's median latency in that race; None for float32 itself.
    """

    latency: Mapping[str, float]
    speedup: Claim | None = None
    float_ms: float | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict on its speed against float32's; unknown where it was not timed against it."""
        return self.speedup.verdict if self.speedup is not None else UNKNOWN

    @property
    def share(self) -> float:
        """Return its median latency over float32's in the same race, or its estimate where that cannot be claimed; 1
        where it was not timed against float32.
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
    """Describe one candidate: how it was made, and what became known of it. See `edgeq.tune.trials.Trial`.

    Attributes:
        status: as `Status` has it; "float32" for the baseline.
        reason: why it is not the chosen one.
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
    timing: Timing | None = None
    memory_bytes: Count | None = None

    @property
    def mark(self) -> str:
        """Return what is drawn: "chosen", "front", "behind", "short" (of the accuracy), "slow" (than float32),
        "dropped" or "float32"."""
        status = _DRAWN.get(self.status, "behind")
        return "front" if self.pareto and status != "chosen" else status

    @property
    def latency_ms(self) -> float | None:
        """Return the median latency; None where it was not timed."""
        value = self.timing.latency.get("p50_ms", 0.0) if self.timing is not None else 0.0
        return value if 0 < value < 1e200 else None

    @property
    def partial(self) -> bool:
        """Return whether its accuracy is known on a part of the samples only, which no other's is compared with."""
        return self.accuracy is not None and not self.accuracy.complete

    @property
    def plugin(self) -> str:
        """Return the engine that runs it; "" for onnxruntime's own kernels."""
        return self.engine if self.engine != DEFAULT else ""


@dataclass(frozen=True)
class ModelRecord:
    """Describe the float32 model: its name, digest and size in bytes."""

    name: str = ""
    sha256: str | None = None
    bytes: Positive | None = None


@dataclass(frozen=True)
class MetricRecord:
    """Name what accuracy was measured in."""

    name: str = "accuracy"
    higher_is_better: bool = True


@dataclass(frozen=True)
class GoalRecord:
    """State what the run was to find; `max_drop` is a fraction of the metric's own scale."""

    objective: str = ""
    max_drop: Finite | None = None
    budget_s: Amount | None = None


@dataclass(frozen=True)
class FloatRecord:
    """Hold float32's figures, with the threads that suit it best."""

    accuracy: Mapping[str, Finite] = field(default_factory=dict)
    timing: Timing | None = None
    threads: Count = 0
    bytes: Positive | None = None


@dataclass(frozen=True)
class HistogramsRecord:
    """Hold latencies of the finalists and float32: queries per bin."""

    edges_ms: tuple[Finite, ...] = ()
    counts: Mapping[str, tuple[Amount, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TuningRecord:
    """Hold the whole tuning record. `chosen` is None where nothing was chosen, "" where that is not recorded;
    `goal_met` tells whether it meets the goal, and `doubts` why that is not certain.
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
        """Return whether a candidate meets what was asked; None where the record does not say."""
        if self.goal_met is not None:
            return self.goal_met
        return None if self.chosen == "" else self.chosen is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the verdict, and what would be needed to meet the goal."""
        return (*self.verdict[:12], *self.needed[:12])

    @cached_property
    def drawn(self) -> tuple[TrialRecord, ...]:
        """Return float32 and at most `MOST_CANDIDATES` candidates, among them the chosen one and the front.

        `pareto` of each says whether it is on the front of the figures that are drawn: none is both as fast and as
        accurate, and better in one. The run's own front rests on bounds, which are not drawn.
        """
        trials = self._with_front()
        order = sorted(range(len(trials)), key=lambda i: (trials[i].status != "chosen", not trials[i].pareto))
        baseline = TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing)
        return (baseline, *(trials[i] for i in sorted(order[:MOST_CANDIDATES])))

    def _with_front(self) -> tuple[TrialRecord, ...]:
        """Return the candidates, `pareto` set by their latency and accuracy as drawn; float32 competes, too."""
        known = (TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing), *self.candidates)
        figures = [(self.latency_of(trial), self.accuracy_of(trial)) for trial in known]
        front, least = set(), math.inf
        for _, worse, i in sorted(
            (ms, -self._sign * value, i)
            for i, (ms, value) in enumerate(figures)
            if ms is not None and value is not None
        ):
            if worse < least and not known[i].partial:
                least = worse
                front.add(i)
        return tuple(replace(trial, pareto=i in front) for i, trial in enumerate(self.candidates, 1))

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the plug-in engines of the candidates that are drawn."""
        return tuple(dict.fromkeys(trial.plugin for trial in self.drawn if trial.plugin))

    @property
    def least_accuracy(self) -> float | None:
        """Return the accuracy that was asked for, in the metric's unit."""
        base, drop = self._base, self.goal.max_drop
        return None if base is None or drop is None else base - self._sign * drop

    def latency_of(self, trial: TrialRecord) -> float | None:
        """Return a candidate's median latency, milliseconds: its ratio to float32 in the race that it was in, times
        float32's own. So races on a machine that became slower in between can be compared."""
        base = self.float32.timing.latency.get("p50_ms") if self.float32.timing is not None else None
        if trial.latency_ms is None or not base or trial.timing is None or trial.timing.float_ms is None:
            return trial.latency_ms
        return base * trial.timing.share

    def accuracy_of(self, trial: TrialRecord) -> float | None:
        """Return a candidate's value of the metric. Of what was measured on a part of the samples only the loss can be
        compared with others, because float32 has another value on that part."""
        found, base = trial.accuracy, self._base
        if trial.status == FLOAT:
            return base
        if found is None:
            return None
        if self.metric.name in found.metrics and found.complete:
            return found.metrics[self.metric.name]
        return None if base is None else base - self._sign * found.drop

    def bytes_of(self, trial: TrialRecord) -> float | None:
        """Return the size of a candidate, or of float32."""
        if trial.status == FLOAT:
            return self.float32.bytes
        return trial.screening.bytes if trial.screening else None

    @property
    def _base(self) -> float | None:
        """Return float32's value of the metric."""
        return self.float32.accuracy.get(self.metric.name, 1.0 if self.metric.name in _AGAINST_FLOAT else None)

    @property
    def _sign(self) -> float:
        return 1.0 if self.metric.higher_is_better else -1.0
