"""Timing in a search: one runner a structure, beside float32; and the last race, which decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeq.tune.candidate import Candidate
from edgeq.tune.evaluator import FLOAT, Evaluator, Race, Runner
from edgeq.tune.explain import less_accurate, points, times
from edgeq.tune.mixed import keep_slow_layers_in_float
from edgeq.tune.record import Stage, Timing, Trial
from edgeq.tune.trials import TIE, TrialTable, accuracy_key, structure_of

MOST_S = 18.0
"""A stage of races that are not settled by then: what is left in doubt is close enough not to matter."""
# Differences that do not matter before the last race.
_ROUGHLY = 0.03
_FINALISTS = 4


@dataclass(frozen=True)
class Baseline:
    """float32 as fast as it gets here."""

    timing: Timing | None = None
    threads: int = 0
    settled: bool = True
    histograms: Mapping[str, Any] = field(default_factory=dict)


def time_kernels(
    table: TrialTable,
    evaluator: Evaluator,
    threads: Sequence[int],
    seconds: float,
    screen: Callable[[Candidate, Stage, str], bool],
) -> Baseline:
    """Choose the threads, time every structure that is alive, keep layers in float that are faster so, and drop what is
    slower than float32."""
    alive = table.alive()
    if not alive:
        return Baseline()
    share = seconds / 3
    float_threads, int8_threads = _choose_threads(table, alive, evaluator, threads, share, "first")
    first = list({structure_of(t): t for t in reversed(table.alive())}.values())[::-1]
    race = _race(evaluator, first, float_threads, top=_FINALISTS, tie=_ROUGHLY, seconds=share)
    for trial in first:
        table.time(trial, race.timings[trial.name])
    _mix(table, evaluator, float_threads, share, screen)
    if table.goal.objective == "memory":
        for trial in first:
            peak = evaluator.memory(trial.candidate, int8_threads)
            for other in table.alive():
                if structure_of(other) == structure_of(trial):
                    table.update(other.name, memory_bytes=peak)
    for trial in table.alive():
        if _surely_slower(trial):
            assert trial.timing is not None
            table.eliminate(trial.name, f"slower than float32: {times(trial.timing)}")
    return Baseline(race.timings[FLOAT], float_threads, race.settled, race.histograms)


def decide(
    table: TrialTable, evaluator: Evaluator, threads: Sequence[int], baseline: Baseline, seconds: float
) -> Baseline:
    """Race the best that qualify, choose one, and say of the others why not. Where none of them is fast enough, the
    next best have their race.

    The threads are chosen anew: minutes have passed, and whatever else the machine does may have changed what pays.
    """
    finalists = _finalists(table, evaluator)
    if not finalists:
        return baseline
    # All that qualify get these threads: speeds with others must not be held against what the race measures.
    remaining = [t for t in table.qualified() if t.name not in {f.name for f in finalists}]
    float_threads, _ = _choose_threads(table, [*finalists, *remaining], evaluator, threads, seconds / 3, "last")
    finalists = [table[trial.name] for trial in finalists]
    race = _race(evaluator, finalists, float_threads, top=1, tie=TIE, seconds=seconds * 2 / 3)
    for trial in finalists:
        table.time(trial, race.timings[trial.name])
    for trial in table.qualified():
        if not _not_slower(trial, strict=table.goal.objective in ("latency", "throughput")):
            assert trial.timing is not None
            table.eliminate(trial.name, f"not faster than float32: {times(trial.timing)}")
    found = Baseline(race.timings[FLOAT], float_threads, race.settled, race.histograms)
    raced = {structure_of(trial) for trial in finalists}
    ranked = [trial for trial in table.qualified() if structure_of(trial) in raced]
    if not ranked:
        return decide(table, evaluator, threads, found, seconds)
    for trial in table.qualified():
        if trial not in ranked:
            reason = f"costlier than the {len(finalists)} that went into the last race"
            table.update(trial.name, status="qualified", reason=reason)
    close = [t for t in ranked if not table.cheaper(ranked[0], t)]
    winner = min(close, key=accuracy_key)
    for trial in ranked:
        _record_why_not(table, trial, winner)
    table.update(winner.name, status="chosen", reason=_why(table, winner))
    return found


def _mix(
    table: TrialTable,
    evaluator: Evaluator,
    float_threads: int,
    seconds: float,
    screen: Callable[[Candidate, Stage, str], bool],
) -> None:
    """Layers that integers make slower, in the fastest kernel choice; where size counts, only if it is not worth
    shipping otherwise."""
    static = [t for t in table.alive() if t.timing and t.candidate.scheme.mode == "static" and not t.candidate.builder]
    if not static:
        return
    least = min(_p50(t) for t in static)
    base = next(t for t in static if _p50(t) <= least * (1 + _ROUGHLY))
    if table.goal.objective in ("size", "memory") and _not_slower(base, strict=False):
        return

    def race(trials: Sequence[Trial]) -> None:
        found = _race(evaluator, trials, float_threads, top=None, tie=_ROUGHLY, seconds=seconds)
        for trial in trials:
            table.time(trial, found.timings[trial.name])

    slow = evaluator.slow_layers(base.candidate, float_threads)
    keep_slow_layers_in_float(table, base, slow, screen, race)


def time_new(table: TrialTable, evaluator: Evaluator, float_threads: int, seconds: float) -> None:
    """Time the structures that qualify and were never timed, roughly: to know whether others need be looked at."""
    new = {structure_of(t): t for t in table.qualified() if table.timed(t).timing is None}
    if new:
        race = _race(evaluator, list(new.values()), float_threads, top=None, tie=_ROUGHLY, seconds=seconds)
        for trial in new.values():
            table.time(trial, race.timings[trial.name])


def _choose_threads(
    table: TrialTable, trials: Sequence[Trial], evaluator: Evaluator, threads: Sequence[int], seconds: float, when: str
) -> tuple[int, int]:
    """The threads that suit float32 and the first of `trials` best, which all of them get; more of them only where
    they pay.

    Args:
        when: part of the runners' names, by which a journal tells a later race of the same ones from an earlier one.
    """
    if len(threads) == 1:
        return threads[0], threads[0]
    trial = trials[0]
    runners: dict[str, Runner] = {f"{FLOAT} {n} {when}": (None, n) for n in threads}
    runners.update({f"int8 {n} {when}": (trial.candidate, n) for n in threads})
    race = evaluator.race(runners, f"{FLOAT} {threads[0]} {when}", top=None, tie=_ROUGHLY, seconds=seconds)
    best = []
    for kind in (FLOAT, "int8"):
        # Not the median: it hides the runs in which one thread waits for another on a core that is busy elsewhere.
        mean = {n: race.timings[f"{kind} {n} {when}"].latency["mean_ms"] for n in threads}
        quickest = min(mean.values())
        fewest = [n for n in threads if mean[n] <= quickest * (1 + TIE)]
        best.append(min(fewest, key=lambda n: n if n else float("inf")))
    for trial in trials:
        table.update(trial.name, candidate=trial.candidate.replace(threads=best[1]))
    return best[0], best[1]


def _race(
    evaluator: Evaluator, trials: Sequence[Trial], float_threads: int, *, top: int | None, tie: float, seconds: float
) -> Race:
    runners: dict[str, Runner] = {FLOAT: (None, float_threads)}
    runners.update({t.name: (t.candidate, t.candidate.threads) for t in trials})
    return evaluator.race(runners, FLOAT, top=top, tie=tie, seconds=seconds)


def _finalists(table: TrialTable, evaluator: Evaluator) -> list[Trial]:
    """Of each structure that qualifies the most accurate: the cheapest few, and all that were never timed."""
    best: dict[str, Trial] = {}
    for trial in sorted(table.qualified(), key=accuracy_key):
        best.setdefault(structure_of(trial), table.timed(trial))
    if table.goal.objective == "memory":
        for key, trial in best.items():
            if trial.memory_bytes is None:
                peak = evaluator.memory(trial.candidate, trial.candidate.threads)
                best[key] = table.update(trial.name, memory_bytes=peak)
    new = [t for t in best.values() if t.timing is None]
    old = sorted((t for t in best.values() if t.timing is not None), key=table.cost)
    return [*old[:_FINALISTS], *new]


def _p50(trial: Trial) -> float:
    return trial.timing.latency["p50_ms"] if trial.timing else float("inf")


def _surely_slower(trial: Trial) -> bool:
    speedup = trial.timing.speedup if trial.timing else None
    return speedup is not None and speedup["high"] < 1


def _not_slower(trial: Trial, *, strict: bool) -> bool:
    """Whether it is faster than float32 beyond doubt; without `strict`, as fast within a tie is enough."""
    speedup = trial.timing.speedup if trial.timing else None
    return speedup is not None and speedup["low"] > (1 if strict else 1 / (1 + TIE))


def _why(table: TrialTable, winner: Trial) -> str:
    superlatives = {"latency": "fastest", "throughput": "fastest", "size": "smallest", "memory": "leanest"}
    found = winner.assessment
    assert found is not None
    return f"the {superlatives[table.goal.objective]} that keeps the accuracy asked for: loses {points(found.loss)}"


def _record_why_not(table: TrialTable, trial: Trial, winner: Trial) -> None:
    if structure_of(trial) == structure_of(winner):
        why = f"as fast as {winner.name}, {less_accurate(trial, winner)}"
    elif table.cheaper(winner, trial):
        share = table.cost(trial) / table.cost(winner)
        superlatives = {"size": "larger than", "memory": "times the memory of"}.get(
            table.goal.objective, "times the latency of"
        )
        why = f"{share:.2f} {'times ' if table.goal.objective == 'size' else ''}{superlatives} {winner.name}"
    else:
        why = f"within {TIE:.0%} of {winner.name}, {less_accurate(trial, winner)}"
    table.update(trial.name, status="qualified", reason=why)
