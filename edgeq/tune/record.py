"""What tuning found, as values that become the tuning record: plain JSON, keys as docs/tune.md lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq_device.engines import FLOAT

from edgeq.engines import DEFAULT
from edgeq.records import plain, written
from edgeq.report.tuning_record import Assessment, Screening, Stage, StageTime, Status, Timing
from edgeq.tune.candidate import Candidate


@dataclass(frozen=True)
class Trial:
    """One candidate and all that became known of it.

    Attributes:
        assessment: accuracy on this machine's kernels.
        simulated: accuracy in a simulator of the target; None where nothing simulates it, or nothing had to be known.
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
    simulated: Assessment | None = None
    timing: Timing | None = None
    memory_bytes: int | None = None
    status: Status = "eliminated"
    reason: str = ""
    pareto: bool = False

    @property
    def name(self) -> str:
        """The candidate's name, which is unique in a search."""
        return self.candidate.name

    @property
    def judged(self) -> Assessment | None:
        """The accuracy that counts: the simulator's where it was measured."""
        return self.simulated or self.assessment

    def replace(self, **changes: Any) -> Trial:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)

    def __record__(self) -> dict[str, Any]:
        engine = self.candidate.engine
        return {
            **plain(self.candidate),
            "engine": engine.engine.name if engine else DEFAULT,
            "precision": engine.precision if engine else FLOAT,
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


def _or_none(name: str) -> str | None:
    return name or None


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        trials: all candidates, in the order in which they were made.
        chosen: name of the winner; "" where nothing qualified.
        fallback: name of the candidate that runs where the winner's engine is missing; "" where it has none, or float32
            has to do.
        baseline: float32's timing, with the threads that suit it best.
        baseline_threads: those threads.
        stages: what took how long.
        settled: whether the order of the finalists is settled, as `Race` has it.
        out_of_time: whether the budget ended the search.
        histograms: {"edges_ms": [...], "counts": {name: [...]}} of the finalists and float32.
    """

    trials: tuple[Trial, ...] = field(metadata=written(name="candidates"))
    chosen: str = field(metadata=written(form=_or_none))
    baseline: Timing | None
    baseline_threads: int = 0
    stages: tuple[StageTime, ...] = ()
    settled: bool = True
    out_of_time: bool = False
    histograms: Mapping[str, Any] = field(default_factory=dict)
    fallback: str = field(default="", metadata=written(form=_or_none))

    def trial(self, name: str) -> Trial:
        """The trial of that name.

        Raises:
            StopIteration: there is none.
        """
        return next(t for t in self.trials if t.name == name)

    @property
    def winner(self) -> Trial | None:
        """The chosen trial; None where nothing qualified."""
        return self.trial(self.chosen) if self.chosen else None


def relative_latency(trial: Trial) -> float:
    """Median latency over float32's in the same race, which a machine that became slower or faster between two races
    changes little; infinity where it was not timed."""
    return trial.timing.share if trial.timing else float("inf")
