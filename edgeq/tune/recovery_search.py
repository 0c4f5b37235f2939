"""Accuracy recovery, where something fast falls short: methods that cost no speed first, layers in float last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edgeq.progress import Progress
from edgeq.tune.candidate import Candidate
from edgeq.tune.evaluator import Evaluator, Exclusion
from edgeq.tune.goal import Deadline
from edgeq.tune.race import log_best, mark_shortfall, rungs
from edgeq.tune.record import Stage, Trial
from edgeq.tune.trials import TrialTable, loss_of, structure_of

_BASES = 2


class Screen(Protocol):
    def __call__(self, candidate: Candidate, stage: Stage, parent: str = "") -> bool: ...


def recover_accuracy(
    table: TrialTable,
    evaluator: Evaluator,
    deadline: Deadline,
    share: float,
    screen: Screen,
    time_new: Callable[[], None],
    progress: Progress,
) -> None:
    """Try to bring what is cheaper than the best that qualifies above the bar.

    Recoveries first, then layers go to float.
    """

    def expired() -> bool:
        return deadline.passed(share)

    def measured(candidate: Candidate, stage: Stage, parent: str) -> Trial:
        if not screen(candidate, stage, parent):
            return table[candidate.name]
        for samples in rungs(evaluator.total):
            found = evaluator.assess([candidate], samples)[candidate.name]
            trial = table.update(candidate.name, assessment=found)
            if found.low > table.goal.max_drop:
                break
        if not table.meets(trial):
            mark_shortfall(table, trial)
        log_best(table, progress)
        return table[trial.name]

    for base in _bases(table, evaluator):
        if expired():
            return
        time_new()
        if not _worthwhile(table, base):
            continue
        best = _recover(evaluator, base, measured, table.goal.max_drop, expired)
        if table.meets(best):
            continue

        def loss(candidate: Candidate, parent: str = best.name) -> float:
            return loss_of(measured(candidate, "exclusion", parent))

        if not expired():
            evaluator.exclude(best.candidate, Exclusion(loss, table.goal.max_drop, _headroom(table, base), expired))


def _recover(
    evaluator: Evaluator,
    base: Trial,
    measured: Callable[[Candidate, Stage, str], Trial],
    max_drop: float,
    expired: Callable[[], bool],
) -> Trial:
    """The best of `base` with recoveries: group after group, each together, or where that does harm one by one; then
    without those that do harm now that the others are there, and without those that cost speed and are not needed."""
    groups = evaluator.recoveries()
    if base.candidate.scheme.mode != "static" or base.candidate.builder or not groups:
        return base
    best = base
    tried = {frozenset(base.candidate.recoveries)}

    def attempt(candidate: Candidate) -> Trial:
        tried.add(frozenset(candidate.recoveries))
        return measured(candidate, "recovery", best.name)

    for position, group in enumerate(groups):
        title = group[0] if position else "recovery"
        steps = [(group, title), *(((name,), name) for name in group if len(group) > 1)]
        for names, label in steps:
            if expired() or loss_of(best) <= max_drop:
                break
            made = attempt(_with(best.candidate, names, label))
            better = loss_of(made) < loss_of(best)
            best = made if better else best
            if better and names == group:
                break
    for name in reversed(best.candidate.recoveries):
        enough = loss_of(best) <= max_drop
        fewer = _without(best.candidate, name)
        if expired() or frozenset(fewer.recoveries) in tried or (enough and name in groups[0]):
            continue
        made = attempt(fewer)
        best = made if loss_of(made) <= (max_drop if enough else loss_of(best)) else best
    return best


def _with(candidate: Candidate, names: tuple[str, ...], title: str) -> Candidate:
    return candidate.replace(name=f"{candidate.name} + {title}", recoveries=(*candidate.recoveries, *names))


def _without(candidate: Candidate, name: str) -> Candidate:
    remaining = tuple(other for other in candidate.recoveries if other != name)
    return candidate.replace(name=f"{candidate.name} - {name}", recoveries=remaining)


def _bases(table: TrialTable, evaluator: Evaluator) -> list[Trial]:
    """The most accurate trial of each structure that falls short and is cheaper than the best that qualifies."""
    best: dict[str, Trial] = {}
    for trial in sorted((t for t in table if t.assessment and t.timing), key=loss_of):
        speedup = trial.timing.speedup if trial.timing else None
        if speedup is not None and speedup["high"] >= 1:
            best.setdefault(structure_of(trial), trial)
    short = [t for t in best.values() if not table.meets(t) and _worthwhile(table, t)]
    chosen = sorted(short, key=lambda t: (table.cost(t), loss_of(t)))[:_BASES]
    return [_in_full(table, evaluator, t) for t in sorted(chosen, key=loss_of)]


def _worthwhile(table: TrialTable, trial: Trial) -> bool:
    """Whether it would win if it qualified."""
    qualified = table.qualified()
    return not qualified or table.cheaper(trial, qualified[0])


def _headroom(table: TrialTable, trial: Trial) -> float:
    """How far a trial may go from its latency towards float32's, 1 being all the way: where speed is what counts, no
    further than the fastest that qualifies already."""
    own = _latency(trial)
    rivals = table.qualified()[:1] if table.goal.objective in ("latency", "throughput") else []
    slowest = min([1.0, *map(_latency, rivals)])
    return max(0.0, (slowest - own) / (1 - own)) if own < 1 else 0.0


def _latency(trial: Trial) -> float:
    """Of float32's, 1 where it was not timed."""
    return 1 / trial.timing.speedup["estimate"] if trial.timing and trial.timing.speedup else 1.0


def _in_full(table: TrialTable, evaluator: Evaluator, trial: Trial) -> Trial:
    if trial.assessment is not None and trial.assessment.complete:
        return trial
    found = evaluator.assess([trial.candidate], evaluator.total)
    trial = table.update(trial.name, assessment=found[trial.name])
    # Dropped on fewer samples than there are, or for want of time: all samples have the last word.
    return table.update(trial.name, reason="") if table.meets(trial) else trial
