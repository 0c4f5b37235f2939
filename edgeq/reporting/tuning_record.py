"""Read the part of a tuning record that the report draws. `edgeq.tuning.record` writes the whole record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from edgeq.measure.structure_timing import StructureTiming
from edgeq.run.engines import DEFAULT
from edgeq.util.records import Amount, Count, Finite, Positive, Share

FLOAT = "float32"
MOST_CANDIDATES = 300
"""The maximum number of candidates that are drawn."""
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32. Their value for float32 itself is 1."""
_DRAWN = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow", FLOAT: FLOAT}


@dataclass(frozen=True)
class TrialScreening:
    """Hold the size of a candidate's file, and the share of its multiply-accumulates that run in int8."""

    bytes: Count
    int8_mac_share: Share


@dataclass(frozen=True)
class TrialAccuracy:
    """Hold the loss of a candidate against float32 on `samples` samples, and the task's metrics if there are labels.

    Attributes:
        complete: True if these are all the validation samples.
        drop: the loss, in the unit of the metric.
    """

    samples: Count
    complete: bool
    drop: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialRecord:
    """Describe how one candidate was made, and its results. See `edgeq.tuning.trials.Trial`.

    Attributes:
        status: a status of `edgeq.tuning.measurements`, or "float32" for the baseline.
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
    screening: TrialScreening | None = None
    accuracy: TrialAccuracy | None = None
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

    schema: str = ""
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
        order = sorted(range(len(trials)), key=lambda i: (trials[i].status != "chosen", not trials[i].pareto))
        baseline = TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing)
        return (baseline, *(trials[i] for i in sorted(order[:MOST_CANDIDATES])))

    def _with_front(self) -> tuple[TrialRecord, ...]:
        """Return the candidates, with `pareto` set according to the drawn latency and accuracy. The comparison includes
        float32.
        """
        trials = (TrialRecord(FLOAT, status=FLOAT, timing=self.float32.timing), *self.candidates)
        figures = [(self.latency_of(trial), self.accuracy_of(trial)) for trial in trials]
        front, lowest_loss = set(), math.inf
        for _, worse, i in sorted(
            (ms, -self._sign * value, i)
            for i, (ms, value) in enumerate(figures)
            if ms is not None and value is not None and trials[i].status != "eliminated"
        ):
            if worse < lowest_loss and not trials[i].partial:
                lowest_loss = worse
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
        if trial.latency_ms is None or not base or trial.timing is None or trial.timing.float_ms is None:
            return trial.latency_ms
        return base * trial.timing.share

    def accuracy_of(self, trial: TrialRecord) -> float | None:
        """Return a candidate's value of the metric. If the candidate was measured on part of the samples, compute the
        value from its loss, because float32 has a different value on that part.
        """
        assessment, base = trial.accuracy, self._base
        if trial.status == FLOAT:
            return base
        if assessment is None:
            return None
        if self.metric.name in assessment.metrics and assessment.complete:
            return assessment.metrics[self.metric.name]
        return None if base is None else base - self._sign * assessment.drop

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
