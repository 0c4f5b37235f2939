"""All trials of a run, in the order in which they were made, and how they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq_device.claim import FASTER, UNKNOWN
from edgeq_device.engines import FLOAT

from edgeq.report.tuning_record import Assessment, Screening, Stage, StageTime, Status, Timing
from edgeq.run.engines import DEFAULT
from edgeq.tune.goal import Goal
from edgeq.tune.space import Candidate, engine_name
from edgeq.util.records import plain, written


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


def points(loss: float) -> str:
    """A loss as a fraction in points: 0.0123 is "1.23 points"."""
    return f"{100 * loss:.2f} points"


def loses(found: Assessment) -> str:
    """The loss on the samples, and what it may be over many others."""
    text = f"loses {points(found.drop)}"
    bound = points(found.bound)
    return text if bound == points(found.drop) else f"{text}, over many other samples up to {bound}"


def in_simulator(found: Assessment) -> str:
    """The loss in a simulator of the target, and what it rests on."""
    return f"loses {points(found.drop)} in the simulator{_interval(found)}, {found.samples} samples"


def times(timing: Timing, of: str = "") -> str:
    """The ratio to float32 with its interval."""
    found = timing.speedup
    if found is None:
        return ""
    if found.interval is None:
        return f"the speed is not measurable here: {found.reason or 'too few pairs of runs'}"
    whose = f"{of}'s" if of else "its"
    return f"{found.interval[0]:.2f} times {whose} speed ({found.figures()})"


def unmeasured(*trials: Trial) -> str:
    """Why the speeds of `trials` cannot be compared: what is wrong with the first that cannot be claimed; "" where all
    that were timed can be."""
    unclear = next((t.timing for t in trials if t.timing is not None and t.timing.verdict == UNKNOWN), None)
    return times(unclear) if unclear is not None else ""


def behind(trial: Trial, faster: Trial, *, tied: bool = False) -> str:
    """By how much `trial` takes longer than `faster`; that this is not known where no speed can be claimed, or with
    `tied`."""
    unclear = unmeasured(trial, faster)
    if unclear or tied:
        return f"in speed not distinguishable from {faster.name}{f': {unclear}' if unclear else ''}"
    return f"{share(trial, faster):.2f} times the latency of {faster.name}"


def hopeless(found: Assessment, max_drop: float) -> str:
    """Why a candidate was not measured on all samples."""
    return f"{loses(found)} after {found.samples} samples; 97.5 % sure that all do not show {points(max_drop)} or less"


def share(trial: Trial, other: Trial) -> float:
    """The latency of `trial` over that of `other`, each as a share of float32's; 0 where one was not timed."""
    if trial.timing is None or other.timing is None:
        return 0.0
    return trial.timing.share / other.timing.share


def less_accurate(trial: Trial, better: Trial) -> str:
    """Why `better` is preferred to `trial`, which is as fast."""
    if points(_loss(trial)) != points(_loss(better)):
        return f"and loses up to {points(_loss(trial))}, not {points(_loss(better))}"
    a, b = (t.assessment.sqnr_db if t.assessment else 0.0 for t in (trial, better))
    return f"as accurate, and its outputs are further from float32's (SQNR {a:.1f} dB, not {b:.1f})"


def verdict(outcome: Outcome, goal: Goal) -> tuple[str, ...]:
    """What was found, the most important first."""
    winner = outcome.winner
    if winner is None:
        asked = f"loses at most {points(goal.max_drop)} and is faster than float32"
        lines = [f"no candidate {asked}", *needed(outcome, goal)]
    else:
        found, timing = winner.assessment, winner.timing
        assert found is not None
        assert timing is not None
        lines = [
            f"{winner.name} runs at {times(timing, of='float32')}",
            f"it loses {points(found.drop)}{_interval(found)}, by {found.basis}, on {found.samples} samples; "
            f"{points(goal.max_drop)} were allowed",
        ]
        lines += _engines(outcome, winner)
        if found.doubt:
            lines.append(
                f"over many other samples up to {points(found.bound)} are to be expected, "
                f"on {found.samples} others up to {points(found.prediction_bound)} (nine chances of ten)"
            )
    if not outcome.settled:
        lines.append("the fastest candidates could not be distinguished in the time that there was")
    if outcome.out_of_time:
        lines.append("the budget ended the search; more time may find a better one")
    return tuple(lines)


def _engines(outcome: Outcome, winner: Trial) -> list[str]:
    """How the engine that won compares with the others; nothing where there was one."""
    best: dict[str, Trial] = {}
    # Of one structure all have the same time: one that was in the end's choice says more than one that was dropped.
    for trial in sorted(
        (t for t in outcome.trials if t.timing), key=lambda t: (relative_latency(t), t.status == "eliminated")
    ):
        best.setdefault(engine_name(trial.candidate), trial)
    own, lines = engine_name(winner.candidate), []
    for name, trial in best.items():
        if name != own:
            times_its = share(trial, winner)
            why = f": {trial.reason}" if times_its < 1 and trial.reason else ""
            behind = f"{times_its:.2f} times its latency: {trial.name}, {trial.status}{why}"
            lines.append(f"{own} runs it; the fastest in {name} has {behind}")
    if winner.candidate.engine is not None:
        what = outcome.fallback or "float32"
        lines.append(f"where {own} is not installed, {what} runs in onnxruntime's own kernels")
    return lines


def needed(outcome: Outcome, goal: Goal) -> tuple[str, ...]:
    """What would be needed where nothing qualified: the nearest misses, and what would let each through."""
    lines = []
    timed = [t for t in outcome.trials if t.timing]
    measured = [t for t in timed if t.assessment and t.assessment.complete]
    quick = [t for t in measured if _verdict(t) == FASTER]
    accurate = [t for t in measured if _loss(t) <= goal.max_drop]
    near = min(quick, key=_loss) if quick else min(accurate or timed, key=relative_latency, default=None)
    unclear = unmeasured(near) if near is not None else ""
    if quick and near is not None and near.assessment is not None:
        lines.append(
            f"{near.name} is faster than float32 and {loses(near.assessment)}: "
            f"--max-drop {100 * _loss(near) + 0.005:.2f}% would let it through"
        )
    elif unclear:
        lines.append(f"{unclear}. --resume measures it again; try it when the machine is quiet")
    elif accurate and near is not None:
        lines.append(f"{near.name} keeps the accuracy, at {_times_float(near)}: not worth shipping")
    elif near is not None and not any(_verdict(t) == FASTER for t in timed):
        lines.append(f"int8 does not pay here: the fastest, {near.name}, has {_times_float(near)}")
    elif not outcome.out_of_time:
        lines.append("no candidate was measured in full: the reasons are with the candidates")
    if outcome.out_of_time:
        lines.append("more --budget: the search was not finished")
    return tuple(lines)


def _interval(found: Assessment) -> str:
    """Empty where nothing is known of it: the whole scale."""
    return "" if found.high - found.low >= 1 else f" ({points(found.low)} to {points(found.high)})"


def _loss(trial: Trial) -> float:
    return trial.assessment.bound if trial.assessment else float("inf")


def _times_float(trial: Trial) -> str:
    return times(trial.timing, of="float32") if trial.timing else ""


def _verdict(trial: Trial) -> str:
    return trial.timing.verdict if trial.timing else UNKNOWN


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
