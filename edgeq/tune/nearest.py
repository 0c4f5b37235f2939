"""Choose a candidate if none certainly meets the goal.

Candidates are compared in four steps. Each step decides only between candidates that are equal so far:

- Candidates that meet the goal by their figures come first.
- Candidates whose loss is certainly allowed come before candidates whose loss is allowed only as measured on the
  samples. If no candidate's loss is allowed, the smallest loss wins.
- Candidates that may be faster than float32 come first.
- The fastest candidate wins. If several are about as fast, the most accurate of them wins.
"""

from __future__ import annotations

from edgeq_device.claim import UNKNOWN
from edgeq_device.latency import ESTIMATE_S

from edgeq.tune.goal import BEHIND, MISSED
from edgeq.tune.judge import in_full
from edgeq.tune.race import SHORT_S, race
from edgeq.tune.trials import Trial, Trials, accuracy_of, loses, speed_of, times


def choose_nearest(trials: Trials) -> None:
    """Choose the candidate that is nearest to the goal, if any working candidate was built. If there is not even an
    estimate of its speed, time it, even if the time for an estimate exceeds the budget.
    """
    best = _nearest(trials, _measured(trials))
    if best is None:
        return
    timing = trials.timed(best).timing
    claim = timing.speedup if timing is not None else None
    if claim is None or (claim.interval is None and claim.estimated is None):
        race(trials, [best], max(ESTIMATE_S, trials.deadline.left_s(SHORT_S)))
    found = trials[best.name].judged
    assert found is not None
    kept = accuracy_of(best, trials.goal) != MISSED
    role = "the best by its figures" if kept and speed_of(best, trials.goal) != MISSED else "the nearest to the goal"
    trials.update(best.name, status="chosen", reason=f"{role}: {loses(found)}, at {times(trials[best.name].timing)}")


def _measured(trials: Trials) -> list[Trial]:
    """Return the trials that were assessed on all samples.

    If none of them keeps the accuracy, take the trial that loses least on fewer samples, and assess it on all samples.
    If nothing was assessed because everything is slow, take the fastest trials, and assess the one whose outputs are
    closest to float32's.
    """
    seen = [t for t in trials if t.screening is not None and t.assessment is not None]
    if seen:
        known = [t for t in seen if t.assessment is not None and t.assessment.complete]
        if any(accuracy_of(t, trials.goal) != MISSED for t in known):
            return known
        least = min(seen, key=lambda t: t.accuracy_key)
        return known if least in known else [*known, in_full(trials, least)]
    built = [t for t in trials if t.screening is not None and t.timing is not None and t.verdict != UNKNOWN]
    least_s = min((t.latency for t in built), default=0.0)
    near = [t for t in built if t.latency <= least_s * (1 + BEHIND)]
    return [in_full(trials, max(near, key=lambda t: t.sqnr_db))] if near else []


def _nearest(trials: Trials, measured: list[Trial]) -> Trial | None:
    """Return the trial in `measured` that is nearest to the goal. All trials in `measured` were measured on all
    samples.
    """
    if not measured:
        return None
    goal = trials.goal

    def standing(trial: Trial) -> tuple[bool, int, bool]:
        """Return a sort key: whether the goal allows the trial, then its accuracy, then whether it may be fast."""
        accuracy, speed = accuracy_of(trial, goal), speed_of(trial, goal)
        return MISSED in (accuracy, speed), accuracy, speed == MISSED

    first = min(standing(t) for t in measured)
    left = [t for t in measured if standing(t) == first]
    if first[1] == MISSED:
        return min(left, key=lambda t: t.accuracy_key)
    least = min(trials.cost(t) for t in left)
    return min((t for t in left if trials.cost(t) <= least * (1 + BEHIND)), key=lambda t: t.accuracy_key)
