"""Write sentences on the result of a search: the verdict, what is in doubt, and what would be needed."""

from __future__ import annotations

from edgeq_device.measure.claim import FASTER, SLOWER

from edgeq.hardware.target import Target
from edgeq.tuning.comparison import judge_accuracy, judge_speed
from edgeq.tuning.goal import DOUBTFUL, MET, MISSED, Goal
from edgeq.tuning.sentences import (
    describe_drop,
    describe_interval,
    describe_loss,
    describe_simulated_loss,
    describe_speed,
    describe_unclaimed,
    format_points,
)
from edgeq.tuning.space import engine_name
from edgeq.tuning.trials import Outcome, Trial


def is_goal_met(outcome: Outcome, goal: Goal) -> bool:
    """Return whether the chosen candidate meets the goal, at least by its figures."""
    winner = outcome.winner
    return winner is not None and MISSED not in (judge_accuracy(winner, goal), judge_speed(winner, goal))


def describe_doubts(outcome: Outcome, goal: Goal) -> tuple[str, ...]:
    """Write why it is not certain that the chosen candidate meets the goal. The result is empty if it is certain."""
    winner, lines = outcome.winner, []
    assessment = winner.final_assessment if winner is not None else None
    if winner is None or assessment is None:
        return ()
    if judge_accuracy(winner, goal) == DOUBTFUL:
        lines.append(
            f"accuracy in doubt: it {describe_drop(assessment.drop)} on these {assessment.samples} samples; "
            f"on many others it may lose up to {format_points(assessment.bound)}"
        )
    if judge_speed(winner, goal) == DOUBTFUL:
        why = describe_unclaimed(winner) or "it was not timed"
        lines.append(
            f"speed unproven: {why}{_describe_earlier_claim(outcome)}; "
            "⟨resume=True⟩ ⟨force=True⟩ on a quiet machine measures it again"
        )
    return tuple(lines)


def _describe_earlier_claim(outcome: Outcome) -> str:
    """Write the speed that an earlier run claimed for the chosen candidate, or "" if none did."""
    if outcome.earlier is None:
        return ""
    return f"; an earlier run on this machine claimed {outcome.earlier:.2f} times for these kernels of this model"


def describe_verdict(outcome: Outcome, goal: Goal) -> tuple[str, ...]:
    """Write the result of a search, the most important line first."""
    winner = outcome.winner
    missed_goal = f"no candidate loses at most {format_points(goal.limit)} and is faster than float32"
    if winner is None:
        lines = [missed_goal, *describe_needs(outcome, goal)]
    else:
        assessment = winner.final_assessment
        assert assessment is not None
        loss = f"it {describe_drop(assessment.drop)}{describe_interval(assessment)}, by {assessment.basis}"
        lines = [] if is_goal_met(outcome, goal) else [f"goal missed: {missed_goal}; {winner.name} comes closest"]
        lines += [
            f"{winner.name} runs at {describe_speed(winner.timing, of='float32') or 'a speed that is not known'}",
            f"{loss}, on {assessment.samples} samples; {format_points(goal.limit)} were allowed",
            *describe_doubts(outcome, goal),
            *_describe_engines(outcome, winner),
        ]
        if assessment.doubt and judge_accuracy(winner, goal) == MET:
            likely = format_points(assessment.prediction_bound)
            lines.append(
                f"on many other samples it may lose up to {format_points(assessment.bound)}, "
                f"on {assessment.samples} others up to {likely} (nine chances of ten)"
            )
        if not is_goal_met(outcome, goal):
            lines += describe_needs(outcome, goal)
    # These two lines qualify everything above, so they come last.
    if not outcome.settled:
        lines.append("the fastest candidates could not be distinguished in the time available")
    if outcome.out_of_time:
        lines.append("the budget ended the search; more time may find a better one")
    return tuple(lines)


def find_runners_up(outcome: Outcome) -> dict[str, Trial]:
    """Return the best trial of each engine but the winner's, by the engine's name."""
    rank = {"chosen": 0, "qualified": 0, "short": 1}
    best: dict[str, Trial] = {}
    # A form that keeps the accuracy comes before faster ones that do not.
    timed = (t for t in outcome.trials if t.timing)
    for trial in sorted(timed, key=lambda t: (rank.get(t.status, 2), t.latency, t.loss)):
        best.setdefault(engine_name(trial.candidate), trial)
    if outcome.winner is not None:
        best.pop(engine_name(outcome.winner.candidate), None)
    return best


def _describe_engines(outcome: Outcome, winner: Trial) -> list[str]:
    """Write one line for each engine but the winner's: its best form, with speed and loss. The result is empty if there
    was only one engine.
    """
    runners_up = find_runners_up(outcome)
    winner_engine, lines = engine_name(winner.candidate), []
    for engine, trial in runners_up.items():
        loss = describe_loss(trial.final_assessment) if trial.final_assessment else trial.reason
        speed = describe_speed(trial.timing, of="float32") or "a speed that is not known"
        role = f"; runs where {winner_engine} is not installed" if trial.name == outcome.fallback else ""
        lines.append(f"runner-up in {engine}: {trial.name}, {speed}, {loss}{role}")
    if winner.candidate.engine is not None and not any(t.name == outcome.fallback for t in runners_up.values()):
        fallback = outcome.fallback or "float32"
        lines.append(f"if {winner_engine} is not installed, {fallback} runs in onnxruntime's own kernels")
    return lines


def describe_needs(outcome: Outcome, goal: Goal) -> tuple[str, ...]:
    """If nothing qualified, write the trials that missed the goal by the least, and what would let each of them
    qualify.
    """
    lines = []
    timed = [t for t in outcome.trials if t.timing]
    measured = [t for t in timed if t.assessment and t.assessment.complete]
    accurate = [t for t in measured if t.loss <= goal.limit]
    # If no candidate is accurate enough, report the missing accuracy, even if speeds are unknown.
    quick = [t for t in measured if t.verdict == FASTER or (not accurate and judge_speed(t, goal) != MISSED)]
    fastest = min(accurate or timed, key=lambda t: t.latency, default=None)
    nearest = min(quick, key=lambda t: t.loss) if quick else fastest
    unclear = describe_unclaimed(nearest) if nearest is not None else ""
    if nearest is not None and quick and nearest.assessment is not None:
        speed = "is faster than float32 and " * (nearest.verdict == FASTER)
        lines.append(
            f"{nearest.name} {speed}{describe_loss(nearest.assessment)}: "
            f"⟨max_drop⟩ {100 * nearest.loss + 0.005:.2f}% would let it through"
        )
    # On a busy machine nothing can be said about speed, and a reason that names a ratio would mislead.
    elif unclear:
        earlier = _describe_earlier_claim(outcome) if nearest is not None and nearest.name == outcome.chosen else ""
        lines.append(
            f"no speed could be claimed: {unclear}{earlier}. ⟨resume=True⟩ on a quiet machine measures it again"
        )
    elif nearest is not None and accurate:
        so = "float32 is the better choice" if nearest.verdict == SLOWER else "no difference in speed is settled"
        lines.append(f"{nearest.name} keeps the accuracy, at {describe_speed(nearest.timing, of='float32')}: {so}")
    elif nearest is not None and not any(t.verdict == FASTER for t in timed):
        speed = describe_speed(nearest.timing, of="float32")
        lines.append(f"int8 does not pay here: the fastest, {nearest.name}, has {speed}")
    elif not outcome.out_of_time:
        lines.append("no candidate was measured on all samples: see the reason given for each")
    if outcome.out_of_time:
        lines.append("give more ⟨budget⟩: the search was not finished")
    return tuple(lines)


def describe_shortfall(target: Target, goal: Goal, outcome: Outcome) -> str:
    """Return why nothing was chosen, in one line."""
    assessed = [trial for trial in outcome.trials if trial.final_assessment]
    if assessed:
        best = min(assessed, key=lambda t: (t.simulated is None, t.loss))
        on = f" ({describe_simulated_loss(best.simulated)})" if best.simulated else ""
        return (
            f"goal missed: no form for {target.name} loses at most {goal.limit:g} in simulation: the best, "
            f"{best.loss:.4f}{on}"
        )
    reasons = [trial.reason for trial in outcome.trials] or ["its profile has no scheme that fits the data"]
    return f"no form for {target.name} could be built: {reasons[0]}"
