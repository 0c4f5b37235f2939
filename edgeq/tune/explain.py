"""The outcome of a search as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
