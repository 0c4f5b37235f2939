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
each recovery that seems to hold (`confirm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from edgeq.hardware.profile import Profile
from edgeq.progress import SILENT, Progress
from edgeq.report.tuning_record import StageTime
from edgeq.tune.candidate import Candidate
from edgeq.tune.confirm import confirm
from edgeq.tune.decision import decide
from edgeq.tune.engines import Field, with_entrants
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.fallback import fall_back
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.halving import halve
from edgeq.tune.record import Outcome
from edgeq.tune.recovery import recover_accuracy
from edgeq.tune.screening import build_all, build_methods
from edgeq.tune.timing import time_kernels
from edgeq.tune.trials import TrialTable

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
