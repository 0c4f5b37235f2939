"""Judge accuracy by successive halving: all candidates on few samples, the last ones on all samples. Then time the best
qualifying candidates against each other, choose one, and record why each of the others was not chosen.

A simulator of the target takes a thousand times as long as this machine's kernels, so the search runs candidates in
this machine's kernels. Normally the results differ only by roundings. If they differ by more, only the simulator shows
it. So each candidate that is about to be chosen also runs in the simulator, and the simulator's figure replaces this
machine's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgeq_device.measure.claim import UNKNOWN

from edgeq.errors import RuntimeUnavailableError
from edgeq.tuning.build import build, is_same_file
from edgeq.tuning.comparison import judge_accuracy
from edgeq.tuning.goal import MISSED
from edgeq.tuning.measurements import Assessment, Stage
from edgeq.tuning.pace import EQUAL
from edgeq.tuning.race import LONGEST_S, RACE_S, SHORT_S, choose_threads, is_not_slower, race, race_until_claimed
from edgeq.tuning.sentences import (
    describe_allowed_loss,
    describe_hopeless,
    describe_loss,
    describe_lower_accuracy,
    describe_simulated_loss,
    describe_speed,
    describe_speed_against_float,
    format_points,
)
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import FLOAT_MACS, Trial, Trials, group_by_structure

# Fewer samples say too little about a loss to drop a candidate.
FEWEST_SAMPLES = 32
OUT_OF_TIME = "the budget ran out before it was measured in full"
_SUPERLATIVES = {
    "latency": "fastest",
    "throughput": "fastest",
    "size": "smallest",
    "memory": "leanest",
    FLOAT_MACS: "one with the most MACs in int8",
}


def list_rounds(trials: Trials) -> tuple[int, ...]:
    """Return the number of samples in each round: an eighth, a quarter, a half, all. Only the last number may be below
    32.
    """
    total = trials.evaluator.total
    sizes = (total >> k for k in range(trials.pace.halvings, 0, -1))
    return (*(n for n in sizes if n >= FEWEST_SAMPLES), total)


def halve_candidates(trials: Trials) -> None:
    """Assess the candidates in the run on more and more samples. After each round, drop those that cannot win.

    Two kinds of candidates cannot win: those that, with 97.5 % certainty, will not keep the accuracy on all samples,
    and the less accurate half of each structure. At the end, every trial in the run has been measured on all samples.
    """
    deadline, total = trials.deadline, trials.evaluator.total
    sample_count, each_s = 0, 0.0  # samples so far; seconds per sample and candidate
    for samples in list_rounds(trials):
        # The time per sample is known from the round before, so predict whether this round fits into the budget.
        best, round_s = trials.promising(), each_s * (samples - sample_count)
        if round_s * len(best) > deadline.remaining_s() or deadline.passed():
            # Measure at least the most promising candidate in full: any result is better than none.
            affordable = max(1, int(deadline.remaining_s() / round_s)) if round_s else 1
            for trial in best[affordable:]:
                trials.eliminate(trial.name, OUT_OF_TIME)
        entered = trials.alive()
        if not entered:
            return
        start = deadline.elapsed_s
        assessments = trials.evaluator.assess([t.candidate for t in entered], samples)
        each_s = (deadline.elapsed_s - start) / ((samples - sample_count) * len(entered))
        sample_count = samples
        for name, assessment in assessments.items():
            trials.update(name, assessment=assessment)
            if samples < total and assessment.least_bound(samples / total) > trials.goal.limit:
                trials.eliminate(name, describe_hopeless(assessment, trials.goal.limit))
        if samples < total:
            for group in group_by_structure(trials.promising()):
                # Trials of one structure are equally fast, so among them accuracy alone decides.
                for trial in group[(len(group) + 1) // 2 :]:
                    why = f"as fast as {group[0].name}, {describe_lower_accuracy(trial, group[0])} ({samples} samples)"
                    trials.eliminate(trial.name, why)
            _note_best(trials)
    for trial in trials.alive():
        _mark_shortfall(trials, trial)
    _note_best(trials)


def build_and_assess(trials: Trials, candidate: Candidate, stage: Stage, parent: str) -> Trial:
    """Build one candidate and assess it on more and more samples, as long as it may still meet the goal. If it meets
    the goal on this machine's kernels, also assess it in the simulator.
    """
    if not build(trials, candidate, stage, parent):
        return trials[candidate.name]
    sample_count, each_s = 0, 0.0  # samples so far; seconds per sample
    for samples in list_rounds(trials):
        if each_s * (samples - sample_count) > trials.deadline.remaining_s():
            trials.eliminate(candidate.name, OUT_OF_TIME)
            return trials[candidate.name]
        start = trials.deadline.elapsed_s
        assessment = trials.evaluator.assess([candidate], samples)[candidate.name]
        each_s, sample_count = (trials.deadline.elapsed_s - start) / (samples - sample_count), samples
        trials.update(candidate.name, assessment=assessment)
        # Do not stop earlier, because candidates that fall short are also compared by their loss.
        if assessment.low > trials.goal.limit:
            break
    _mark_shortfall(trials, trials[candidate.name])
    _note_best(trials)
    return simulate_trial(trials, trials[candidate.name])


def _mark_shortfall(trials: Trials, trial: Trial) -> None:
    """Mark a trial that loses too much on all samples, or is certain to do so after fewer samples."""
    assessment, max_drop = trial.assessment, trials.goal.limit
    assert assessment is not None
    if not assessment.complete:
        trials.eliminate(trial.name, describe_hopeless(assessment, max_drop))
    elif not trials.meets(trial):
        trials.update(
            trial.name,
            status="short",
            reason=f"{describe_loss(assessment)}; {describe_allowed_loss(assessment, max_drop)}",
        )


def _note_best(trials: Trials) -> None:
    """Show one line on the leading candidate, if the line has changed."""
    leading = next(iter(trials.qualified() or trials.promising()), None)
    if leading is None or leading.assessment is None:
        return
    sample_note = f" on {leading.assessment.samples} samples" if not leading.assessment.complete else ""
    speed = "" if trials.evaluator.counts else describe_speed(leading.timing, of="float32")
    line = f"best so far: {leading.name}: {describe_loss(leading.assessment)}{sample_note}{speed and f', {speed}'}"
    if line != trials.leader:
        trials.leader = line
        trials.progress.note(line)


def confirm_in_simulator(trials: Trials) -> None:
    """Run qualifying candidates in the simulator, the best first, until one of them keeps the accuracy there. The
    remaining candidates are not simulated.
    """
    confirmed: Trial | None = None
    for place, trial in enumerate(trials.qualified()):
        if confirmed is not None:
            if trial.simulated is None:
                reason = f"not simulated: {confirmed.name} keeps the accuracy and costs no more"
                trials.update(trial.name, status="qualified", reason=reason)
        elif place and trials.deadline.passed():
            trials.eliminate(trial.name, "the budget ran out before it was simulated")
        else:
            contender = simulate_trial(trials, trial)
            if trials.meets(contender) and not contender.reason:
                if contender.simulated is None:  # there is no simulator
                    return
                confirmed = contender


def simulate_trial(trials: Trials, trial: Trial) -> Trial:
    """Return `trial` with the simulator's figure. If there is no simulator, or if the trial loses too much on this
    machine's kernels, return it unchanged.
    """
    if trial.simulated is not None or not trials.meets(trial):
        return trial
    try:
        assessment = trials.evaluator.simulate(trial.candidate, trials.goal.limit, trials.deadline.remaining_s())
    except RuntimeUnavailableError as error:
        trials.eliminate(trial.name, error.problem)
        return trials.update(trial.name, assessment=None)
    if assessment is None:
        return trial
    trial, sentence = trials.update(trial.name, simulated=assessment), describe_simulated_loss(assessment)
    trials.progress.note(f"{trial.name} {sentence}")
    if not trials.meets(trial):
        return trials.update(
            trial.name, status="short", reason=f"{sentence}; {format_points(trials.goal.limit)} are allowed"
        )
    surer = _find_surer(trials, assessment)
    if surer is not None:
        trial = trials.update(
            trial.name, status="qualified", reason=f"{sentence}; {surer.name} keeps the accuracy on more"
        )
    return trial


def _find_surer(trials: Trials, assessment: Assessment) -> Trial | None:
    """Return a trial that keeps the accuracy in the simulator on more samples than `assessment`.

    The budget may have ended while `assessment` was measured, and its few samples may have been lucky. Return None if
    `assessment` is certain, or if there is no trial with more samples.
    """
    if assessment.high <= trials.goal.limit:
        return None
    return next((t for t in trials.qualified() if t.simulated and t.simulated.samples > assessment.samples), None)


def choose_best(trials: Trials, threads: Sequence[int]) -> None:
    """Time the best qualifying candidates against each other, and choose one. If none of them is fast enough, or if
    other candidates were faster than the leader in an earlier race, do the same with the next best.

    The number of threads is chosen again before each race, because this machine's processors may share cores
    differently by then.
    """
    confirm_in_simulator(trials)
    raced_structures: set[str] = (
        set()
    )  # Structures that were in a last race. Each further race adds others, so the loop ends.
    while finalists := _select_finalists(trials, raced_structures):
        seconds = trials.deadline.remaining_s(RACE_S)
        # All trials that qualify get these numbers of threads, because speeds with other numbers cannot be compared
        # with this race.
        remaining = [t for t in trials.qualified() if t.name not in {f.name for f in finalists}]
        choose_threads(trials, [*finalists, *remaining], threads, seconds / 3, "last")
        finalists = [trials[trial.name] for trial in finalists]
        trials.raced = race_until_claimed(trials, finalists, seconds * 2 / 3, LONGEST_S, rough=False)
        for trial in trials.qualified():
            if not is_not_slower(trials, trial):
                trials.eliminate(trial.name, describe_speed_against_float(trial.timing))
        raced_structures |= {trial.structure for trial in finalists}
        ranked = [trial for trial in trials.qualified() if trial.structure in raced_structures]
        unraced = [trial for trial in trials.qualified() if trial.structure not in raced_structures]
        if ranked and (trials.deadline.passed() or not any(trials.is_cheaper(rival, ranked[0]) for rival in unraced)):
            _choose(trials, ranked)
            return
    _time_nearest(trials)


def _time_nearest(trials: Trials) -> None:
    """If nothing is chosen, time the candidate that loses least, unless it has been timed. Then the report can name
    what would be needed to meet the goal.
    """
    measured = [t for t in trials if t.candidate.quantized and t.assessment is not None and t.assessment.complete]
    nearest = min(measured, key=lambda t: t.loss, default=None)
    if nearest is not None and trials.with_timing(nearest).timing is None and not trials.deadline.passed():
        race(trials, [nearest], trials.deadline.remaining_s(SHORT_S))


def _select_finalists(trials: Trials, raced_structures: Collection[str]) -> list[Trial]:
    """Return the finalists: the most accurate trial of each of these structures, if it qualifies:

    - all structures in `raced_structures`, which were in an earlier last race
    - the few cheapest of the other timed structures, unless they are behind
    - all structures that were never timed
    """
    best = [
        trials.with_timing(group[0])
        for group in group_by_structure(sorted(trials.qualified(), key=lambda t: t.accuracy_key))
    ]
    if trials.objective == "memory":
        for place, trial in enumerate(best):
            if trial.memory_bytes is None:
                peak = trials.evaluator.memory(trial.candidate, trial.candidate.threads)
                best[place] = trials.update(trial.name, memory_bytes=peak)
    new = [t for t in best if t.timing is None]
    old = sorted((t for t in best if t.timing is not None), key=trials.cost)
    unraced = [t for t in old if t.structure not in raced_structures]
    lowest_cost = min((trials.cost(t) for t in unraced if t.verdict != UNKNOWN), default=float("inf"))
    contenders = [t for t in unraced if trials.cost(t) <= lowest_cost * (1 + trials.pace.behind)]
    return [*(t for t in old if t.structure in raced_structures), *contenders[: trials.pace.finalists], *new]


def _choose(trials: Trials, ranked: Sequence[Trial]) -> None:
    """Choose the most accurate of the cheapest trials in `ranked`, which is sorted by cost. Call this when no other
    qualifying trial is cheaper, or when the time is up.
    """
    cheapest = [t for t in ranked if not trials.is_cheaper(ranked[0], t)]
    winner = min(cheapest, key=lambda t: t.accuracy_key)
    assert winner.assessment is not None
    for trial in trials.qualified():
        earlier = ", in an earlier race" if trial not in ranked and trials.by_time else ""
        trials.update(
            trial.name, status="qualified", reason=_describe_defeat(trials, trial, winner, cheapest) + earlier
        )
    lost = (
        describe_simulated_loss(winner.simulated) if winner.simulated is not None else describe_loss(winner.assessment)
    )
    why = f"the {_SUPERLATIVES[trials.objective]} that keeps the required accuracy: {lost}"
    trials.update(winner.name, status="chosen", reason=why)


def _describe_defeat(trials: Trials, trial: Trial, winner: Trial, cheapest: Sequence[Trial]) -> str:
    """Write why `winner` was chosen instead of `trial`, which also qualifies."""
    if trial.structure == winner.structure:
        return f"as fast as {winner.name}, {describe_lower_accuracy(trial, winner)}"
    if trial in cheapest:
        return f"within {EQUAL:.0%} of {winner.name}, {describe_lower_accuracy(trial, winner)}"
    if trials.objective == FLOAT_MACS:
        return f"{trials.cost(trial):.1%} of the MACs in float, {winner.name} {trials.cost(winner):.1%}"
    times_what = {"size": "times larger than", "memory": "times the memory of"}
    share = trials.cost(trial) / trials.cost(winner)
    return f"{share:.2f} {times_what.get(trials.objective, 'times the latency of')} {winner.name}"


def find_fallback(trials: Trials, winner: Trial | None) -> str:
    """Return the name of the candidate that runs if the plug-in of `winner` is missing. It is the fastest int8 form in
    onnxruntime's own kernels that keeps the accuracy, by the best estimates of the speeds: some form must run there,
    so a speed need not be certain.

    Return "" if the winner needs no plug-in, or if float32 is faster than all these forms. The file of the winner may
    have been dropped in these kernels in favour of a faster engine, so it is measured now.
    """
    choice = winner.candidate.engine if winner is not None else None
    if winner is None or choice is None:
        return ""
    twin = winner.candidate.replace(name=winner.name.replace(f" in {choice.name}", ""), engine=None, threads=0)
    if twin.quantized and not trials.deadline.passed():
        build(trials, twin, "recovery", winner.name)
    forms = [
        trials.with_timing(t) for t in trials if t.screening and t.candidate.engine is None and t.candidate.quantized
    ]
    timed = [t for t in forms if t.timing is not None]
    untimed = [t for t in forms if t.timing is None and (is_same_file(t, winner) or not timed)][: trials.pace.finalists]
    if untimed and not trials.deadline.passed():
        race(trials, untimed, trials.deadline.remaining_s(SHORT_S))
        timed += [trials[t.name] for t in untimed]
    for trial in sorted(timed, key=lambda t: (t.latency, not is_same_file(t, winner))):
        if trial.latency > 1:
            break
        if (trial.assessment is None or not trial.assessment.complete) and trials.deadline.passed():
            continue
        trial = assess_in_full(trials, trial)
        if judge_accuracy(trial, trials.goal) != MISSED:
            role = f"the fallback if {choice.engine.name} is not installed"
            reason = "; ".join(filter(None, (trials[trial.name].reason, role)))
            return trials.update(trial.name, status="qualified", reason=reason).name
    return ""


def assess_in_full(trials: Trials, trial: Trial) -> Trial:
    """Return `trial` with its accuracy on all samples."""
    if trial.assessment is not None and trial.assessment.complete:
        return trial
    assessments = trials.evaluator.assess([trial.candidate], trials.evaluator.total)
    return trials.update(trial.name, assessment=assessments[trial.name])
