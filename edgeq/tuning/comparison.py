"""Compare trials with the goal, by what is certain about their accuracy and speed."""

from __future__ import annotations

from edgeq.tuning.goal import DOUBTFUL, MET, MISSED, Goal
from edgeq.tuning.pace import EQUAL
from edgeq.tuning.trials import BY_TIME, Trial


def judge_accuracy(trial: Trial, goal: Goal) -> int:
    """Return `MET` if the goal allows the bound of the loss, `DOUBTFUL` if it allows only the loss on the samples, else
    `MISSED`.
    """
    assessment = trial.final_assessment
    if assessment is None or not assessment.complete or assessment.drop > goal.limit:
        return MISSED
    return MET if assessment.bound <= goal.limit else DOUBTFUL


def judge_speed(trial: Trial, goal: Goal) -> int:
    """Return `MET` if a trial is certainly faster than float32, `DOUBTFUL` if its whole spread says so but is only an
    estimate, else `MISSED`. If speed is not the objective, equal speed is enough.

    An interval or a spread that merely reaches beyond float32's speed counts for nothing, however uncertain it is:
    otherwise the least certain figure would win over the settled ones. An estimate counts for nothing either if another
    engine runs the trial than float32: next to other work, engines wait for cores in different ways, and one busy loop
    made a form seem 1.6 times as fast that is half as fast.
    """
    # A goal of size or memory only asks that the model is not slower, and races do not settle a smaller difference.
    threshold = 1.0 if goal.objective in BY_TIME else 1 / (1 + EQUAL)
    claim = trial.timing.speedup if trial.timing else None
    spread = claim and (claim.interval or claim.estimated)
    if not claim or not spread or spread[1] <= threshold:
        return MISSED
    if claim.interval is None and trial.candidate.engine is not None:
        return MISSED
    return MET if claim.interval is not None else DOUBTFUL
