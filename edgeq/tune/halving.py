"""Accuracy by successive halving: all candidates on few samples, the better ones on more, the last ones on all."""

from __future__ import annotations

from collections.abc import Iterator

from edgeq.report.tuning_record import Stage
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.explain import Trial, hopeless, less_accurate, loses, points, times
from edgeq.tune.goal import Deadline
from edgeq.tune.screening import build
from edgeq.tune.space import Candidate
from edgeq.tune.trials import TrialTable, accuracy_key, structure_of
from edgeq.util.display import Progress

_FIRST = 32
_HALVINGS = 3


def rungs(total: int, *, thorough: bool = False) -> tuple[int, ...]:
    """How many samples each round takes: an eighth, a quarter, a half, all; none below 32 but the last. A thorough
    search takes all at once."""
    sizes = [total >> k for k in range(_HALVINGS, 0, -1)] if not thorough else []
    return (*(n for n in sizes if n >= _FIRST), total)


def halve(table: TrialTable, evaluator: Evaluator, deadline: Deadline, progress: Progress) -> None:
    """Assess the candidates that are in the run, dropping on the way those that cannot win.

    Two kinds cannot: one of which all samples will not show that it keeps the accuracy, 97.5 % sure, and one that loses
    more than half of the others of its own structure. Afterwards every trial in the run was measured in
    full.
    """
    seen, each_s = 0, 0.0  # samples so far; seconds a sample and candidate
    for samples in rungs(evaluator.total, thorough=table.goal.thorough):
        best = sorted(table.alive(), key=lambda t: (accuracy_key(t), table.cost(t)))
        # The one that looks best is measured in full all the same: an answer beats none.
        for trial in best[max(1, _affordable(deadline, each_s * (samples - seen), len(best))) :]:
            table.eliminate(trial.name, "the budget ran out before it was measured in full")
        entered = table.alive()
        if not entered:
            return
        start = deadline.elapsed_s
        found = evaluator.assess([t.candidate for t in entered], samples)
        each_s = (deadline.elapsed_s - start) / ((samples - seen) * len(entered))
        seen = samples
        for name, assessment in found.items():
            table.update(name, assessment=assessment)
        if samples == evaluator.total:
            break
        _drop_hopeless(table, samples / evaluator.total)
        _drop_worse_half(table, samples)
        _note_best(table, progress)
    for trial in table.alive():
        if not table.meets(trial):
            _mark_shortfall(table, trial)
    _note_best(table, progress)


def _affordable(deadline: Deadline, each_s: float, count: int) -> int:
    """How many of `count` candidates can be assessed in the time that is left, at `each_s` seconds each."""
    left = deadline.left_s()
    return count if each_s * count <= left and not deadline.passed() else int(left / each_s) if each_s else 0


def build_and_assess(
    table: TrialTable, evaluator: Evaluator, candidate: Candidate, stage: Stage, parent: str, progress: Progress
) -> Trial:
    """Build one candidate and assess it on ever more samples, as long as it may still meet the goal."""
    if not build(table, evaluator, candidate, stage, parent):
        return table[candidate.name]
    for samples in rungs(evaluator.total, thorough=table.goal.thorough):
        found = evaluator.assess([candidate], samples)[candidate.name]
        trial = table.update(candidate.name, assessment=found)
        if found.low > table.goal.max_drop:  # no sooner: what falls short is compared by its loss, too
            break
    if not table.meets(trial):
        _mark_shortfall(table, trial)
    _note_best(table, progress)
    return table[trial.name]


def _mark_shortfall(table: TrialTable, trial: Trial) -> None:
    """Mark a trial that loses too much: measured in full, or surely so after fewer samples."""
    found = trial.assessment
    assert found is not None
    if not found.complete:
        table.eliminate(trial.name, hopeless(found, table.goal.max_drop))
        return
    table.update(trial.name, status="short", reason=f"{loses(found)}; {points(table.goal.max_drop)} are allowed")


def _note_best(table: TrialTable, progress: Progress) -> None:
    """One line on the candidate that leads now, if that is news."""
    leaders = table.qualified() or sorted(table.alive(), key=lambda t: (accuracy_key(t), table.cost(t)))
    for trial in leaders[:1]:
        if trial.assessment is None:
            return
        speed = f", {times(trial.timing, of='float32')}" if trial.timing else ""
        seen = f" on {trial.assessment.samples} samples" if not trial.assessment.complete else ""
        line = f"best so far: {trial.name}: {loses(trial.assessment)}{seen}{speed}"
        if line != table.leader:
            table.leader = line
            progress.note(line)


def _drop_hopeless(table: TrialTable, share: float) -> None:
    for trial in table.alive():
        found = trial.assessment
        if found is not None and found.least_bound(share) > table.goal.max_drop:
            table.eliminate(trial.name, hopeless(found, table.goal.max_drop))


def _drop_worse_half(table: TrialTable, samples: int) -> None:
    for group in _by_structure(table.alive()):
        group.sort(key=accuracy_key)
        for trial in group[(len(group) + 1) // 2 :]:
            why = f"as fast as {group[0].name}, {less_accurate(trial, group[0])} ({samples} samples)"
            table.eliminate(trial.name, why)


def _by_structure(trials: list[Trial]) -> Iterator[list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(structure_of(trial), []).append(trial)
    yield from groups.values()
