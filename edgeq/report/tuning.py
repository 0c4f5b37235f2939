"""A tuning record as what the report draws: candidates with a status, facts, notes."""

from __future__ import annotations

from dataclasses import dataclass

from edgeq.engines import DEFAULT
from edgeq.report.facts import Pairs, pairs
from edgeq.report.numbers import difference, metric_name
from edgeq.report.tuning_record import Assessment, GoalRecord, Timing, TrialRecord, TuningRecord

MOST_CANDIDATES = 300
_AGAINST_FLOAT = ("top-1 agreement", "agreement", "cosine")
"""Metrics of agreement with float32, which by nature has 1."""
# What a scheme has where nothing special was chosen: not worth a line in each candidate's settings.
_USUAL = {"mode": "static", "weight_symmetric": "yes", "activation_symmetric": "no", "reduce_range": "no"}
_STATUS = {"chosen": "chosen", "short": "short", "eliminated": "dropped", "slow": "slow"}


@dataclass(frozen=True)
class Candidate:
    """One candidate of a tuning run.

    Attributes:
        accuracy: in the tuning's metric; None where it was dropped before that was measured.
        latency_ms: median; `low_ms` and `high_ms` bound it.
        status: "chosen", "front", "behind", "short" (of the accuracy), "slow" (than float32), "dropped" or "float32".
        reason: why it is not the chosen one.
        engine: what runs it, with its precision; "" for onnxruntime's own kernels.
    """

    name: str
    settings: Pairs = ()
    accuracy: float | None = None
    latency_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    bytes: float | None = None
    coverage: float | None = None
    status: str = "behind"
    reason: str = ""
    engine: str = ""


@dataclass(frozen=True)
class Tuning:
    """What was searched and what came of it.

    Attributes:
        met: whether a candidate meets what was asked; None where the record does not say.
        least_accuracy: what was asked for, in the metric's unit; `allowed_loss` as a loss against float32.
        facts: what else is worth a line: objective, budget, seconds, candidates tried.
    """

    metric: str
    candidates: tuple[Candidate, ...]
    higher_is_better: bool = True
    least_accuracy: float | None = None
    allowed_loss: float | None = None
    met: bool | None = None
    facts: Pairs = ()
    notes: tuple[str, ...] = ()
    left_out: int = 0

    @property
    def engines(self) -> tuple[str, ...]:
        """Those that run candidates, besides onnxruntime's own kernels."""
        return tuple(dict.fromkeys(c.engine for c in self.candidates if c.engine))


def tuning_of(record: TuningRecord) -> Tuning | None:
    """None where there are no candidates."""
    trials = record.candidates
    if not trials:
        return None
    metric, higher = record.metric.name, record.metric.higher_is_better
    base = record.float32.accuracy.get(metric, 1.0 if metric in _AGAINST_FLOAT else None)
    drop = record.goal.max_drop
    # The chosen ones first, so that a limit never takes them away.
    order = sorted(range(len(trials)), key=lambda i: (trials[i].status != "chosen", not trials[i].pareto))
    kept = [trials[i] for i in sorted(order[:MOST_CANDIDATES])]
    baseline = Candidate(
        name="float32",
        accuracy=base,
        latency_ms=_latency(record.float32.timing, "p50_ms"),
        bytes=record.float32.bytes,
        status="float32",
    )
    sign = 1.0 if higher else -1.0
    return Tuning(
        metric=metric,
        candidates=(baseline, *(_candidate(trial, metric, base, sign) for trial in kept)),
        higher_is_better=higher,
        least_accuracy=None if base is None or drop is None else base - sign * drop,
        allowed_loss=drop,
        met=None if record.chosen == "" else record.chosen is not None,
        facts=_facts(record, metric),
        notes=(*record.verdict[:12], *record.needed[:12]),
        left_out=len(trials) - len(kept),
    )


def _candidate(trial: TrialRecord, metric: str, base: float | None, sign: float) -> Candidate:
    status = _STATUS.get(trial.status, "behind")
    return Candidate(
        name=trial.name,
        settings=_settings(trial),
        accuracy=_accuracy(trial.accuracy, metric, base, sign),
        latency_ms=_latency(trial.timing, "p50_ms"),
        low_ms=_latency(trial.timing, "low_ms"),
        high_ms=_latency(trial.timing, "high_ms"),
        bytes=trial.screening.bytes if trial.screening else None,
        coverage=trial.screening.int8_mac_share if trial.screening else None,
        status="front" if trial.pareto and status != "chosen" else status,
        reason=trial.reason,
        engine=trial.engine if trial.engine != DEFAULT else "",
    )


def _settings(trial: TrialRecord) -> Pairs:
    scheme = [(key, value) for key, value in pairs(trial.scheme, 30) if _USUAL.get(key) != value]
    rest = {
        "engine": trial.engine,
        "precision": trial.precision,
        "recoveries": trial.recoveries,
        "threads": trial.threads or "",
        "builder": trial.builder,
        "parent": trial.parent,
    }
    return (*scheme, *pairs(rest, 10))


def _accuracy(found: Assessment | None, metric: str, base: float | None, sign: float) -> float | None:
    """The value of the metric. Of what was measured on a part of the samples only the loss can be compared with others,
    because float32 has another value on that part."""
    if found is None:
        return None
    if metric in found.metrics and found.complete:
        return found.metrics[metric]
    return None if base is None else base - sign * found.drop


def _latency(timing: Timing | None, key: str) -> float | None:
    value = timing.latency.get(key, 0.0) if timing is not None else 0.0
    return value if 0 < value < 1e200 else None


def _facts(record: TuningRecord, metric: str) -> Pairs:
    goal: GoalRecord = record.goal
    drop = goal.max_drop
    facts = [
        ("objective", goal.objective),
        (
            "allowed loss",
            difference(metric, drop).lstrip("+") + f" of {metric_name(metric)}" if drop is not None else "",
        ),
        ("budget", _seconds(goal.budget_s)),
        ("took", _seconds(record.elapsed_s)),
        ("candidates", str(len(record.candidates))),
        ("order of the finalists", {True: "settled", False: "not settled", None: ""}[record.settled]),
        ("ended", "by the budget" if record.out_of_time else ""),
    ]
    return tuple((key, value) for key, value in facts if value)


def _seconds(value: float | None) -> str:
    if value is None or value >= 1e9:
        return ""
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{value:.1f} s" if value < 10 else f"{seconds} s"
