"""The search: screen, time, halve, recover, decide. Greedy, one coordinate at a time; every step leaves a reason.

1. Kernel choices (what decides speed) are built and screened.
2. Threads, then kernel choices, are timed against float32. Layers that integers make slower go to float. What is
   slower than float32 even so is dropped.
3. Calibration methods on what is left: as fast, other accuracy.
4. Successive halving on accuracy.
5. Where something faster than the best that qualifies falls short: recoveries, cheapest first, then layers in float.
6. A last race of those that qualify, beside float32, decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from edgeq.errors import EdgeqError
from edgeq.hardware.profile import Profile
from edgeq.progress import SILENT, Progress
from edgeq.tune import speed
from edgeq.tune.candidate import Candidate
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.race import halve
from edgeq.tune.record import Outcome, Stage, StageTime, Trial
from edgeq.tune.recovery_search import recover_accuracy
from edgeq.tune.space import method_candidates
from edgeq.tune.speed import Baseline
from edgeq.tune.trials import TrialTable, structure_of

# Shares of the budget by which each stage hands over to the next.
_SCREENED, _TIMED, _METHODS, _HALVED, _RECOVERED = 0.2, 0.3, 0.4, 0.6, 0.9
# Of candidates that are equally fast, one whose outputs are this much further from float32's is not worth measuring.
_SQNR_BEHIND_DB = 6.0


class Search:
    """One run. `run` gives the outcome; `table` holds what is known so far, also after an interruption."""

    def __init__(
        self,
        profile: Profile,
        evaluator: Evaluator,
        goal: Goal,
        deadline: Deadline,
        *,
        threads: Sequence[int] = (0,),
        progress: Progress = SILENT,
    ) -> None:
        self.table = TrialTable(goal)
        self._profile = profile
        self._evaluator = evaluator
        self._goal = goal
        self._deadline = deadline
        self._threads = tuple(threads)
        self._progress = progress
        self._stages: list[StageTime] = []

    def run(self, candidates: Sequence[Candidate]) -> Outcome:
        """Search from `candidates`, the most promising first."""
        table, evaluator, deadline, progress = self.table, self._evaluator, self._deadline, self._progress
        self._stage("building", lambda: self._screen(candidates, "space", _SCREENED))
        baseline = Baseline()

        def time_kernels() -> None:
            nonlocal baseline
            seconds = deadline.left_s(_TIMED, speed.MOST_S)
            baseline = speed.time_kernels(table, evaluator, self._threads, seconds, self._screened)

        self._stage("timing", time_kernels)
        self._stage("methods", lambda: self._methods(baseline))
        self._stage("accuracy", lambda: halve(table, evaluator, deadline, _HALVED, progress))

        def recover() -> None:
            def time_new() -> None:
                seconds = deadline.left_s(_RECOVERED, speed.MOST_S / 4)
                speed.time_new(table, evaluator, baseline.threads, seconds)

            recover_accuracy(table, evaluator, deadline, _RECOVERED, self._screened, time_new, progress)

        self._stage("recovery", recover)
        final = baseline

        def decide() -> None:
            nonlocal final
            final = speed.decide(table, evaluator, self._threads, baseline, deadline.left_s(1.0, speed.MOST_S))

        self._stage("last race", decide)
        table.mark_pareto()
        return Outcome(
            trials=tuple(table),
            chosen=next((t.name for t in table if t.status == "chosen"), ""),
            baseline=final.timing,
            baseline_threads=final.threads,
            stages=tuple(self._stages),
            settled=final.settled,
            out_of_time=deadline.passed(),
            histograms=final.histograms,
        )

    def _stage(self, name: str, work: Callable[[], Any]) -> None:
        # No progress stage of its own: what works in it opens stages, and two at once cannot be drawn.
        before, start = len(self.table.alive()), self._deadline.elapsed_s
        work()
        spent = self._deadline.elapsed_s - start
        self._stages.append(StageTime(name, round(spent, 3), before, len(self.table.alive())))

    def _screen(self, candidates: Sequence[Candidate], stage: Stage, share: float) -> None:
        for position, candidate in enumerate(candidates):
            if position and self._deadline.passed(share):
                self.table.add(candidate, stage)
                self.table.eliminate(candidate.name, "the budget ran out before it was built")
                continue
            self._screened(candidate, stage)

    def _screened(self, candidate: Candidate, stage: Stage, parent: str = "") -> bool:
        """Build and look; whether the candidate is still in the run."""
        table = self.table
        if candidate.name in table:
            return not table[candidate.name].reason
        table.add(candidate, stage, parent)
        try:
            screening = self._evaluator.screen(candidate)
        except EdgeqError as error:
            table.eliminate(candidate.name, error.problem)
            return False
        duplicate = next((t for t in table if t.screening and t.screening.content == screening.content), None)
        table.update(candidate.name, screening=screening)
        if duplicate is not None:
            table.eliminate(candidate.name, f"the same model as {duplicate.name}")
        elif screening.int8_mac_share == 0:
            table.eliminate(candidate.name, "nothing of it runs in int8")
        table.timed(table[candidate.name])
        return not table[candidate.name].reason

    def _drop_dominated(self) -> None:
        """Kernel choices that are no cheaper than another one whose outputs are far closer to float32's."""
        for trial in self.table.alive():
            for other in self.table.alive():
                cheap = not self.table.cheaper(trial, other)
                behind = _sqnr(other) - _sqnr(trial)
                if cheap and behind > _SQNR_BEHIND_DB:
                    why = f"no better than {other.name} in {self._goal.objective}, and its outputs' SQNR"
                    self.table.eliminate(trial.name, f"{why} is {behind:.0f} dB lower")
                    break

    def _methods(self, baseline: Baseline) -> None:
        self._drop_dominated()
        for kernel in list(self.table.alive()):
            family = [
                c.replace(threads=kernel.candidate.threads) for c in method_candidates(kernel.candidate, self._profile)
            ]
            self._screen(family, "space", _METHODS)
        for structure in dict.fromkeys(structure_of(t) for t in self.table.alive()):
            group = [t for t in self.table.alive() if structure_of(t) == structure]
            best = max(group, key=_sqnr)
            for trial in group:
                behind = _sqnr(best) - _sqnr(trial)
                if behind > _SQNR_BEHIND_DB:
                    self.table.eliminate(
                        trial.name, f"as fast as {best.name}, and its outputs' SQNR is {behind:.0f} dB lower"
                    )


def _sqnr(trial: Trial) -> float:
    """Of the screening, dB; equal outputs count as 200, so that differences are numbers."""
    return min(200.0, trial.screening.sqnr_db) if trial.screening else -200.0
