"""All trials of a run, in the order in which they were made, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from edgeq.report.tuning_record import Stage, Timing
from edgeq.tune.explain import Trial, relative_latency
from edgeq.tune.goal import Goal
from edgeq.tune.space import Candidate

TIE = 0.01
"""Speeds that differ by less, as a share, are equal: the more accurate one wins then."""
ROUGHLY = 0.03
"""Differences of speed that do not matter before the last race."""
BY_TIME = ("latency", "throughput")
"""The objectives whose costs are speeds."""
WIDE_COST = 0.5
"""What 16 bits cost where nothing can be timed, float being 1."""
FLOAT_MACS = "MACs in float"
"""The objective where nothing can be timed: their share, as small as possible."""


class TrialTable:
    """Trials by name. A trial without a reason is still in the run.

    Attributes:
        objective: the goal's, or `FLOAT_MACS` where nothing can be timed.
        leader: the last line that was shown on the candidate that leads.
    """

    def __init__(self, goal: Goal, *, timed: bool = True) -> None:
        self.goal = goal
        self.objective: str = goal.objective if timed else FLOAT_MACS
        self.leader = ""
        self._trials: dict[str, Trial] = {}
        self._timings: dict[tuple[str, int], Timing] = {}

    def __iter__(self) -> Iterator[Trial]:
        return iter(tuple(self._trials.values()))

    def __getitem__(self, name: str) -> Trial:
        return self._trials[name]

    def __contains__(self, name: str) -> bool:
        return name in self._trials

    def add(self, candidate: Candidate, stage: Stage = "space", parent: str = "") -> Trial:
        """Enter a candidate; one of that name that is there stays."""
        return self._trials.setdefault(candidate.name, Trial(candidate, stage, parent))

    def update(self, name: str, **changes: Any) -> Trial:
        """Replace fields of a trial by name, and give the new one."""
        self._trials[name] = self._trials[name].replace(**changes)
        return self._trials[name]

    def eliminate(self, name: str, reason: str) -> None:
        """Drop a trial from the run."""
        self.update(name, status="eliminated", reason=reason)

    def alive(self) -> list[Trial]:
        """Those that were built and are still in the run."""
        return [trial for trial in self if not trial.reason and trial.screening is not None]

    def time(self, trial: Trial, timing: Timing) -> None:
        """Remember the speed of a structure; every trial of that structure has it."""
        assert trial.screening is not None
        self._timings[(trial.screening.structure, trial.candidate.threads)] = timing
        for other in self:
            if other.screening and _speed_key(other) == _speed_key(trial):
                self.update(other.name, timing=timing)

    def timed(self, trial: Trial) -> Trial:
        """`trial` with its structure's timing, if that is known."""
        if trial.screening is None or trial.timing is not None:
            return trial
        timing = self._timings.get(_speed_key(trial))
        return self.update(trial.name, timing=timing) if timing else trial

    def cost(self, trial: Trial) -> float:
        """What the objective makes as small as possible: bytes, or a share of float32's latency or MACs; infinity
        while unknown."""
        if self.objective == FLOAT_MACS:
            found = trial.screening
            return 1 - found.int8_mac_share + WIDE_COST * found.wide_share if found else float("inf")
        if self.objective == "size":
            return float(trial.screening.bytes) if trial.screening else float("inf")
        if self.objective == "memory":
            return float(trial.memory_bytes) if trial.memory_bytes is not None else float("inf")
        return relative_latency(trial)

    def cheaper(self, a: Trial, b: Trial, tie: float = TIE) -> bool:
        """Whether `a` costs less than `b`, of measured costs by more than a tie."""
        tie = 0.0 if self.objective == FLOAT_MACS else tie
        return self.cost(a) * (1 + tie) < self.cost(b)

    def meets(self, trial: Trial) -> bool:
        """Whether it was measured on all samples and keeps the accuracy asked for."""
        found = trial.judged
        return found is not None and found.complete and found.bound <= self.goal.max_drop

    def qualified(self) -> list[Trial]:
        """Best first: by cost, of equal cost the more accurate."""
        return sorted((t for t in self.alive() if self.meets(t)), key=lambda t: (self.cost(t), accuracy_key(t)))

    def mark_pareto(self) -> None:
        """Set `pareto` of every trial that was measured in full and timed."""
        front = set(pareto_front(t for t in self if t.assessment and t.assessment.complete and t.timing))
        for trial in self:
            self.update(trial.name, pareto=trial.name in front)


def pareto_front(trials: Iterable[Trial]) -> list[str]:
    """Names of the trials that no other beats in latency or loss without losing in the other; fastest first."""
    points = sorted((relative_latency(t), *accuracy_key(t)) for t in trials)
    front: list[str] = []
    best = float("inf")
    for _, loss, _, name in points:
        if loss < best:
            best = loss
            front.append(name)
    return front


def loss_of(trial: Trial) -> float:
    """What is held against the loss allowed, as a fraction; infinity where it was not assessed."""
    return trial.judged.bound if trial.judged else float("inf")


def accuracy_key(trial: Trial) -> tuple[float, float, str]:
    """Sorts the more accurate first: by loss, where that is equal by the distance of the outputs."""
    sqnr = trial.assessment.sqnr_db if trial.assessment else 0.0
    return loss_of(trial), -sqnr, trial.name


def sqnr_of(trial: Trial) -> float:
    """Of the screening, dB; equal outputs count as 200, so that differences are numbers."""
    return min(200.0, trial.screening.sqnr_db) if trial.screening else -200.0


def structure_of(trial: Trial) -> str:
    """Hash of the trial's structure; "" where it was not built."""
    return trial.screening.structure if trial.screening else ""


def _speed_key(trial: Trial) -> tuple[str, int]:
    return structure_of(trial), trial.candidate.threads
