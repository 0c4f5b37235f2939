"""Threads in a search: the number that suits what each engine runs, and whether it still does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeq_device.claim import UNKNOWN

from edgeq.report.tuning_record import Timing
from edgeq.tune.candidate import Candidate, engine_name
from edgeq.tune.evaluator import FLOAT, Evaluator, Runner
from edgeq.tune.record import Trial
from edgeq.tune.trials import ROUGHLY, TIE, TrialTable

# One number suits beyond doubt what takes so many times as long with any other.
_CLEARLY = 1.5
_ANOTHER_SPEED = 1.15


@dataclass(frozen=True)
class Threads:
    """The number of threads that suits float32.

    Attributes:
        count: 0 is all cores.
        float_ms: median latency of float32 when it was chosen; 0 where there was no choice.
    """

    count: int = 0
    float_ms: float = 0.0

    def hold(self, float32: Timing) -> bool:
        """Whether `float32` still has about the speed that it had then. Two processors that begin to share a core, or
        cease to, make it another one, and other numbers of threads better."""
        if not self.float_ms:
            return True
        ratio = float32.latency["p50_ms"] / self.float_ms
        return max(ratio, 1 / ratio) <= _ANOTHER_SPEED


def choose_threads(
    table: TrialTable, trials: Sequence[Trial], evaluator: Evaluator, threads: Sequence[int], seconds: float, when: str
) -> Threads:
    """The threads that suit float32 best. The trials of each engine get those that suit the first of them best; more
    of them only where they pay. A plug-in's are not raced where one number clearly suits all that onnxruntime's own
    kernels run, unless the search is thorough. The first of `threads` where the machine is too busy to see what pays.

    Args:
        when: part of the runners' names, by which a journal distinguishes a later race of the same ones.
    """
    if len(threads) == 1:
        return Threads(threads[0])
    groups: dict[str, Candidate | None] = {FLOAT: None}
    for trial in sorted(trials, key=lambda t: t.candidate.engine is not None):
        groups.setdefault(_kind(trial), trial.candidate)
    best: dict[str, int] = {}
    medians: dict[int, float] = {}
    clear = not table.goal.thorough
    for kind, candidate in groups.items():
        if candidate is not None and candidate.engine is not None and clear and len(set(best.values())) == 1:
            best[kind] = best[FLOAT]
            continue
        # A race of their own: which number suits one kind says nothing about the order of the kinds.
        runners: dict[str, Runner] = {f"{kind} {n} {when}": (candidate, n) for n in threads}
        found = evaluator.time(runners, next(iter(runners)), tie=ROUGHLY, seconds=seconds / len(groups)).timings
        if any(timing.speedup is not None and timing.verdict == UNKNOWN for timing in found.values()):
            # What others leave of the cores now says nothing about the device at work: the choice stays the device's.
            return Threads(threads[0])
        latencies = {n: found[f"{kind} {n} {when}"].latency for n in threads}
        medians = medians or {n: latency["p50_ms"] for n, latency in latencies.items()}
        # Not the median: it hides the runs in which one thread waits for another on a core that is busy elsewhere.
        mean = {n: latency["mean_ms"] for n, latency in latencies.items()}
        fewest = [n for n in threads if mean[n] <= min(mean.values()) * (1 + TIE)]
        best[kind] = min(fewest, key=lambda n: n if n else float("inf"))
        clear = clear and min(mean[n] for n in threads if n != best[kind]) > _CLEARLY * mean[best[kind]]
    for trial in trials:
        table.update(trial.name, candidate=trial.candidate.replace(threads=best[_kind(trial)]))
    return Threads(best[FLOAT], medians[best[FLOAT]])


def _kind(trial: Trial) -> str:
    return engine_name(trial.candidate) if trial.candidate.engine else "int8"
