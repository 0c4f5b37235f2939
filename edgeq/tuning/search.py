"""Search: build, race, judge, recover. The search is greedy: it changes one coordinate at a time. The search records a
reason for every step.

build    Kernel choices (everything that decides speed) are built and screened, in every engine. Later, the remaining
         choices are built with other calibration methods, and repaired by the recoveries that cost no speed. All these
         forms of a choice are equally fast, but differ in accuracy. Engines share the files.
race     Threads, then kernel choices, are timed against float32. Layers that are slower in integers go to float.
         Candidates still slower than float32 are dropped.
judge    Successive halving on accuracy, and finally a last race between float32 and the candidates that qualify. If
         none certainly meets the goal, the nearest one is chosen (`nearest`).
recover  If a kernel choice loses too much but is cheaper than the best qualifying candidate, it gets the recoveries
         that cost speed, then layers in float.

Until the last race, a candidate is dropped only by figures of its own engine.

If the target's kernels are simulated, speed is counted: the share of multiply-accumulates in float replaces the
latency. If a simulator is too slow for a search, the search uses this machine's kernels instead. A candidate that is
about to be chosen is then also measured in the simulator, and that figure decides (`confirm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import EngineError
from edgeq.hardware.profile import Profile
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.build import build_all, build_forms
from edgeq.tuning.engines import Field, add_entrants
from edgeq.tuning.evaluator import CandidateEvaluator
from edgeq.tuning.goal import Goal
from edgeq.tuning.judge import choose_best, confirm_in_simulator, find_fallback, halve_candidates
from edgeq.tuning.measurements import StageTime
from edgeq.tuning.memory import Memory, Space
from edgeq.tuning.nearest import choose_nearest
from edgeq.tuning.pace import Pace
from edgeq.tuning.race import time_kernels
from edgeq.tuning.recovery import recover_accuracy
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import FLOAT, Outcome, Trials
from edgeq.util.display import SILENT, Progress

_STAGE_ENDS = {
    "building": 0.2,
    "timing": 0.3,
    "methods": 0.4,
    "accuracy": 0.6,
    "simulation": 0.7,
    "recovery": 0.9,
    "last race": 0.95,
}
"""Share of the budget after which each stage ends. The simulation is part of the accuracy stage, and the choice of the
fallback is the end of the last stage."""


def search(
    candidates: Sequence[Candidate],
    profile: Profile,
    evaluator: CandidateEvaluator,
    goal: Goal,
    deadline: BudgetClock,
    *,
    threads: Sequence[int] = (0,),
    engines: Field | None = None,
    pace: Pace | None = None,
    progress: Progress = SILENT,
) -> Outcome:
    """Search for the best candidate for `goal` among `candidates`, the most promising first.

    Args:
        pace: how early candidates are dismissed; by default, the goal's pace.
        profile: the profile whose search table lists the calibration methods to try.
        threads: numbers of threads inside an operator to compare; 0 means all cores.
        engines: the engines to time; by default, onnxruntime's own kernels.
    """
    engines, stages = engines or Field(), list[StageTime]()
    # The table is the only state: each stage reads and changes it, so any stage can be followed in it.
    trials = Trials(evaluator, goal, deadline, progress, pace)

    # This is not a stage of the progress display. The code inside opens such stages, and only one can be drawn at a
    # time.
    @contextmanager
    def stage(name: str) -> Iterator[None]:
        """Record how long a stage took, and how many candidates entered and left it."""
        trials.deadline = deadline.until(_STAGE_ENDS[name])
        entered, start = len(trials.alive()), deadline.elapsed_s
        yield
        stages.append(StageTime(name, round(deadline.elapsed_s - start, 3), entered, len(trials.alive())))

    with stage("building"):
        build_all(trials, add_entrants(candidates, engines, unquantized=goal.objective != "size"))
    with stage("timing"):
        time_kernels(trials, threads, engines)
    with stage("methods"):
        build_forms(trials, profile)
    with stage("accuracy"):
        halve_candidates(trials)
        trials.deadline = deadline.until(_STAGE_ENDS["simulation"])
        confirm_in_simulator(trials)
    with stage("recovery"):
        recover_accuracy(trials, profile)
    with stage("last race"):
        choose_best(trials, threads)
        # Users who did not ask for a strict goal rather have the nearest candidate than nothing.
        if not goal.strict and all(t.status != "chosen" for t in trials):
            choose_nearest(trials)
        winner = next((t for t in trials if t.status == "chosen"), None)
        trials.deadline = deadline
        # The fallback may use all of the remaining budget, because it is the last measurement.
        fallback = find_fallback(trials, winner)
    trials.mark_pareto()
    return Outcome(
        trials=tuple(trials),
        chosen=winner.name if winner else "",
        fallback=fallback,
        baseline=trials.raced.timings[FLOAT] if trials.raced else None,
        baseline_threads=trials.float_threads,
        stages=tuple(stages),
        settled=trials.raced is None or trials.raced.settled,
        out_of_time=deadline.passed(),
        histograms=trials.raced.histograms if trials.raced else {},
    )


@dataclass(frozen=True)
class Searched:
    """Hold the result of the searches of a run.

    Attributes:
        field: the engines that were left at the end.
        memory: values for the tuning record: the "models" whose evidence was used, and whether the search "confirmed"
            the evidence. If no speed could be claimed, "confirmed" is None, and there is a "reason". The dictionary is
            empty if no evidence was used.
    """

    outcome: Outcome
    field: Field
    memory: dict[str, Any]


@dataclass(frozen=True)
class Searches:
    """Hold what all searches of a run share.

    Attributes:
        threads: numbers of threads inside an operator to compare.
        failed: a function that returns the names of the engines whose processes have ended.
    """

    evaluator: CandidateEvaluator
    goal: Goal
    threads: Sequence[int]
    failed: Callable[[], Iterable[str]]
    progress: Progress

    def best(self, space: Space, memory: Memory, budget_s: float | None) -> Searched:
        """First search the part of `space` that `memory` recommends. If the evidence is not confirmed, search all of
        `space`.

        Args:
            budget_s: seconds for everything; None means no limit.

        Raises:
            EngineError: the only engine failed.
        """
        total, narrow, note = BudgetClock(budget_s), memory.narrow(space), {}
        if narrow is not None:
            names = ", ".join(dict.fromkeys(e.model for e in memory.evidence))
            self.progress.note(f"beginning with the winners on {names}; ⟨memory=False⟩ turns this off")
            outcome, field = self._search_space(narrow, total, replace(self.goal, strict=True))
            is_confirmed, unclear = memory.is_confirmed_by(outcome), memory.describe_unclaimed(outcome)
            note = {"models": [e.model for e in memory.evidence], "confirmed": is_confirmed}
            if is_confirmed:
                return Searched(outcome, field, note)
            if unclear:
                note |= {"confirmed": None, "reason": unclear}
                self.progress.note(f"it could not be confirmed here: {unclear}; the whole search follows")
            else:
                self.progress.note("it does not do as well here: the whole search follows")
            # An engine that crashed in the narrowed search would crash again.
            space = replace(space, field=space.field.without(self.failed()))
        clock = BudgetClock(None if budget_s is None else total.remaining_s())
        outcome, field = self._search_space(space, clock, self.goal)
        return Searched(memory.with_earlier_claim(outcome), field, note)

    def _search_space(self, space: Space, deadline: BudgetClock, goal: Goal) -> tuple[Outcome, Field]:
        """Return the outcome of a search of `space`, and the engines that were left at the end."""
        while True:
            arguments = (space.candidates, space.profile, self.evaluator, goal, deadline)
            try:
                outcome = search(*arguments, threads=self.threads, engines=space.field, progress=self.progress)
                return outcome, space.field
            except EngineError as error:
                field = space.field.without(self.failed())
                if not space.field.own or field == space.field:
                    raise
                # Results so far are in the journal, so they are not measured again.
                self.progress.note(f"{error.problem}; the search goes on without it")
                space = replace(space, field=field)
