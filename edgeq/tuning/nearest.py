"""Choose a candidate if none certainly meets the goal.

Candidates that meet the goal by their figures come first: those whose loss is certainly allowed, and of these the
fastest. If several are about as fast, the most accurate of them wins.

If no candidate meets the goal, an int8 form is chosen all the same. It is the fastest one that keeps the accuracy,
whether or not the search dropped it because it is slower than float32. But if all forms faster than float32 lose too
much accuracy, the one of them that loses least is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from edgeq_device.measure.latency import ESTIMATE_S

from edgeq.tuning.comparison import judge_accuracy, judge_speed
from edgeq.tuning.goal import MISSED
from edgeq.tuning.judge import assess_in_full
from edgeq.tuning.pace import BEHIND, EQUAL
from edgeq.tuning.race import RACE_S, SHORT_S, race
from edgeq.tuning.sentences import describe_loss, describe_speed_against_float
from edgeq.tuning.trials import Trial, Trials, group_by_structure


def choose_nearest(trials: Trials) -> None:
    """Choose the candidate that is nearest to the goal, if any working candidate was built. If there is not even an
    estimate of its speed, time it, even if the time for an estimate exceeds the budget.
    """
    goal, measured = trials.goal, [t for t in trials if t.final_assessment is not None and t.final_assessment.complete]
    meeting = [t for t in measured if MISSED not in (judge_accuracy(t, goal), judge_speed(t, goal))]
    surest = min((judge_accuracy(t, goal) for t in meeting), default=MISSED)
    best = _find_cheapest(
        trials, [t for t in meeting if judge_accuracy(t, goal) == surest], BEHIND
    ) or _find_nearest_int8(trials)
    if best is None:
        return
    timing = trials.with_timing(best).timing
    claim = timing.speedup if timing is not None else None
    # A choice without any figure of its speed could not be explained to the user.
    if claim is None or (claim.interval is None and claim.estimated is None):
        race(trials, [best], max(ESTIMATE_S, trials.deadline.remaining_s(SHORT_S)))
    best = trials[best.name]
    assert best.final_assessment is not None
    is_accurate = judge_accuracy(best, goal) != MISSED
    role = "the best by its figures" if is_accurate and judge_speed(best, goal) != MISSED else "the nearest to the goal"
    trials.update(
        best.name,
        status="chosen",
        reason=f"{role}: {describe_loss(best.final_assessment)}, {describe_speed_against_float(best.timing)}",
    )


def _find_cheapest(trials: Trials, among: Sequence[Trial], equal: float) -> Trial | None:
    """Return the cheapest trial in `among`, or the most accurate of those that cost more by less than the share
    `equal`.
    """
    lowest_cost = min((trials.cost(t) for t in among), default=0.0)
    return min(
        (t for t in among if trials.cost(t) <= lowest_cost * (1 + equal)), key=lambda t: t.accuracy_key, default=None
    )


def _find_nearest_int8(trials: Trials) -> Trial | None:
    """Return the int8 form to choose if no candidate meets the goal.

    The races so far were rough, or at different times, so the fastest forms are timed side by side first.
    """
    groups = group_by_structure(_list_int8_forms(trials))
    contenders = [g[0] for g in groups if trials.cost(g[0]) <= trials.cost(groups[0][0]) * (1 + BEHIND)]
    seconds = trials.deadline.remaining_s(RACE_S / 2)
    if trials.by_time and len(contenders) > 1 and seconds:
        race(trials, contenders[: trials.pace.finalists], seconds, rough=False)
    forms = _list_int8_forms(trials)
    quick = [t for t in forms if t.latency < 1]
    untimed = [t for t in trials if t.candidate.quantized and t.timing is None]
    return (
        # The order states the preference: accurate and faster, faster at least, accurate at least, and then anything.
        _find_cheapest(trials, _select_accurate(trials, quick), EQUAL)
        or (_find_most_accurate(trials, [*quick, *untimed]) if quick else None)
        or _find_cheapest(trials, _select_accurate(trials, forms), EQUAL)
        or _find_most_accurate(trials, trials)
    )


def _list_int8_forms(trials: Trials) -> list[Trial]:
    """List the quantized trials that work and whose cost is known, the cheapest first."""
    forms = [trials.with_timing(t) for t in trials if t.candidate.quantized and t.screening]
    return sorted((t for t in forms if trials.cost(t) < math.inf), key=lambda t: (trials.cost(t), -t.sqnr_db))


def _select_accurate(trials: Trials, forms: Sequence[Trial]) -> list[Trial]:
    """Return the trials that keep the accuracy and cost about as much as the cheapest of them. Trials are measured on
    all samples, the cheapest first. If the time is up, only one of them is measured.

    Args:
        forms: trials, the cheapest first.
    """
    accurate: list[Trial] = []
    spent = False
    for trial in forms:
        if accurate and trials.cost(trial) > trials.cost(accurate[0]) * (1 + EQUAL):
            break
        assessment = trial.final_assessment
        if assessment is None or not assessment.complete:
            share = assessment.samples / trials.evaluator.total if assessment is not None else 0.0
            if spent or (assessment is not None and assessment.least_bound(share) > trials.goal.limit):
                continue
            # One measurement after the end of the budget is allowed, because without it there is nothing to choose.
            spent = trials.deadline.passed()
            trial = assess_in_full(trials, trial)
        accurate += [trial] if judge_accuracy(trial, trials.goal) != MISSED else []
    return accurate


def _find_most_accurate(trials: Trials, among: Iterable[Trial]) -> Trial | None:
    """Return the trial in `among` that loses least on the samples that it was measured on, measured on all samples."""
    now = [trials[t.name] for t in among]
    assessed = [t for t in now if t.screening is not None and t.assessment is not None]
    best = min(assessed, key=lambda t: (not t.candidate.quantized, t.accuracy_key), default=None)
    return assess_in_full(trials, best) if best is not None else None
