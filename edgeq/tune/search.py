"""The search: build, time, halve, recover, decide. Greedy, one coordinate at a time; every step leaves a reason.

1. Kernel choices (what decides speed) are built and screened.
2. Threads, then kernel choices, are timed against float32. Layers that integers make slower go to float. What is
   slower than float32 even so is dropped.
3. Calibration methods on what is left: as fast, other accuracy.
4. Successive halving on accuracy.
5. Where something cheaper than the best that qualifies loses too much: recoveries, cheapest first, then layers in
   float.
6. A last race of those that qualify, beside float32, decides.

Where the evaluator has no clock (the target's kernels are simulated), the share of multiply-accumulates in float stands
for the latency, and nothing is timed. Where a simulator is too slow for a search, this machine's kernels stand for it,
and what is about to be chosen is measured in the simulator too: its figure is the one that counts, behind 4 and for
each recovery that seems to hold (`confirm`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edgeq.errors import EngineError
from edgeq.hardware.profile import Profile
from edgeq.report.tuning_record import StageTime
from edgeq.tune.build import build_all, build_methods
from edgeq.tune.engines import Field, with_entrants
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.judge import confirm, decide, fall_back, halve
from edgeq.tune.memory import Memory, Space
from edgeq.tune.recovery import recover_accuracy
from edgeq.tune.space import Candidate
from edgeq.tune.timing import time_kernels
from edgeq.tune.trials import Outcome, TrialTable
from edgeq.util.display import SILENT, Progress

# Shares of the budget by which each stage hands over to the next.
_SCREENED, _TIMED, _METHODS, _HALVED, _CONFIRMED, _RECOVERED = 0.2, 0.3, 0.4, 0.6, 0.7, 0.9


def search(
    candidates: Sequence[Candidate],
    profile: Profile,
    evaluator: Evaluator,
    goal: Goal,
    deadline: Deadline,
    *,
    threads: Sequence[int] = (0,),
    engines: Field | None = None,
    progress: Progress = SILENT,
) -> Outcome:
    """The best candidate for `goal`, searched from `candidates`, the most promising first.

    Args:
        profile: whose search table says which calibration methods to try.
        threads: numbers of threads inside an operator to compare; 0 is all cores.
        engines: what is raced; default: onnxruntime's own kernels.
    """
    engines = engines or Field()
    table = TrialTable(goal, timed=evaluator.timed)
    stages: list[StageTime] = []

    # No progress stage of its own: what works in it opens stages, and two at once cannot be drawn.
    @contextmanager
    def stage(name: str) -> Iterator[None]:
        """Record how long a stage took, and how many candidates entered and left it."""
        entered, start = len(table.alive()), deadline.elapsed_s
        yield
        stages.append(StageTime(name, round(deadline.elapsed_s - start, 3), entered, len(table.alive())))

    with stage("building"):
        entered = with_entrants(candidates, engines, unquantized=goal.objective != "size")
        build_all(table, evaluator, deadline.until(_SCREENED), entered)
    with stage("timing"):
        baseline = time_kernels(table, evaluator, deadline.until(_TIMED), threads, engines)
    with stage("methods"):
        build_methods(table, evaluator, deadline.until(_METHODS), profile)
    with stage("accuracy"):
        halve(table, evaluator, deadline.until(_HALVED), progress)
        confirm(table, evaluator, deadline.until(_CONFIRMED), progress)
    with stage("recovery"):
        recover_accuracy(table, evaluator, deadline.until(_RECOVERED), profile, baseline.threads.count, progress)
    with stage("last race"):
        final = decide(table, evaluator, deadline, threads, baseline, progress)
        winner = next((t for t in table if t.status == "chosen"), None)
        fallback = fall_back(table, evaluator, deadline, winner, final.threads.count)
    table.mark_pareto()
    return Outcome(
        trials=tuple(table),
        chosen=winner.name if winner else "",
        fallback=fallback,
        baseline=final.timing,
        baseline_threads=final.threads.count,
        stages=tuple(stages),
        settled=final.settled,
        out_of_time=deadline.passed(),
        histograms=final.histograms,
    )


@dataclass(frozen=True)
class Searched:
    """What was found.

    Attributes:
        field: the engines that were left at the end.
        memory: for the tuning record: the models whose evidence was used, and whether it held here; None with a reason
            where no speed could be claimed. Empty where none was used.
    """

    outcome: Outcome
    field: Field
    memory: dict[str, Any]


@dataclass(frozen=True)
class Searches:
    """What every search of a run has in common.

    Attributes:
        threads: numbers of threads inside an operator to compare.
        failed: gives the names of the engines whose processes have ended.
    """

    evaluator: Evaluator
    goal: Goal
    threads: Sequence[int]
    failed: Callable[[], Iterable[str]]
    progress: Progress

    def best(self, space: Space, memory: Memory, budget_s: float | None) -> Searched:
        """Search what `memory` has first, and all of `space` where nothing of it holds.

        Args:
            budget_s: seconds for everything; None is no limit.

        Raises:
            EngineError: the only engine failed.
        """
        total, narrow, note = Deadline(budget_s), memory.narrowed(space), {}
        if narrow is not None:
            names = ", ".join(dict.fromkeys(e.model for e in memory.evidence))
            self.progress.note(f"beginning with what won on {names}; --no-memory leaves that out")
            outcome, left = self._searched(narrow, total)
            held, unclear = memory.confirmed(outcome), memory.unmeasured(outcome)
            note = {"models": [e.model for e in memory.evidence], "confirmed": held}
            if held:
                return Searched(outcome, left, note)
            if unclear:
                note |= {"confirmed": None, "reason": unclear}
                self.progress.note(f"it could not be confirmed here: {unclear}; the whole search follows")
            else:
                self.progress.note("it does not do as well here: the whole search follows")
            space = replace(space, field=space.field.without(self.failed()))
        rest = Deadline(None if budget_s is None else total.left_s())
        outcome, left = self._searched(space, rest)
        return Searched(outcome, left, note)

    def _searched(self, space: Space, deadline: Deadline) -> tuple[Outcome, Field]:
        """What is best in `space`, and the engines that were left at the end."""
        while True:
            where = (space.candidates, space.profile, self.evaluator, self.goal, deadline)
            try:
                outcome = search(*where, threads=self.threads, engines=space.field, progress=self.progress)
                return outcome, space.field
            except EngineError as error:
                left = space.field.without(self.failed())
                if not space.field.own or left == space.field:
                    raise
                # What was measured so far is in the journal, and is not measured again.
                self.progress.note(f"{error.problem}; the search goes on without it")
                space = replace(space, field=left)
