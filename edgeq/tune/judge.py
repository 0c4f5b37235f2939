"""Accuracy by successive halving: all candidates on few samples, the better ones on more, the last ones on all.

The decision: a last race of the best that qualify, one of them chosen, and for each of the others the reason.

What this machine's kernels say of a candidate, confirmed or refuted by a simulator of the target.

A simulator takes a thousand times as long, so the search reads the file with this machine's kernels, which differ by
roundings where all is well. Where all is not, nothing but the simulator shows it. So each candidate that is about to be
chosen runs there too, and the simulator's figure takes the place of the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from edgeq_device.claim import UNKNOWN

from edgeq.errors import RuntimeUnavailableError
from edgeq.report.tuning_record import Assessment, Stage
from edgeq.tune.build import build
from edgeq.tune.engines import FAR_BEHIND, same_file
from edgeq.tune.evaluator import FLOAT, Evaluator
from edgeq.tune.goal import Deadline
from edgeq.tune.sessions import choose_threads
from edgeq.tune.space import Candidate
from edgeq.tune.timing import MOST_S, RACED, Baseline, not_slower, race, race_until_claimed
from edgeq.tune.trials import (
    BY_TIME,
    FLOAT_MACS,
    ROUGHLY,
    TIE,
    Trial,
    TrialTable,
    accuracy_key,
    hopeless,
    in_simulator,
    less_accurate,
    loses,
    loss_of,
    points,
    structure_of,
    times,
)
from edgeq.util.display import SILENT, Progress

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


def confirm(table: TrialTable, evaluator: Evaluator, deadline: Deadline, progress: Progress) -> None:
    """Run what qualifies in the simulator, the best first, until one holds there; the others need not."""
    holds: Trial | None = None
    for place, trial in enumerate(table.qualified()):
        if holds is not None:
            if trial.simulated is None:
                reason = f"not simulated: {holds.name} holds and costs no more"
                table.update(trial.name, status="qualified", reason=reason)
        elif place and deadline.passed():
            table.eliminate(trial.name, "the budget ran out before it was simulated")
        else:
            found = in_simulation(table, evaluator, trial, deadline, progress)
            if table.meets(found) and not found.reason:
                if found.simulated is None:  # nothing simulates it
                    return
                holds = found


def in_simulation(
    table: TrialTable, evaluator: Evaluator, trial: Trial, deadline: Deadline, progress: Progress
) -> Trial:
    """`trial` with the simulator's figure, where there is a simulator and this machine's kernels keep the accuracy."""
    if evaluator.timed or trial.simulated is not None or not table.meets(trial):
        return trial
    try:
        found = evaluator.simulate(trial.candidate, table.goal.max_drop, deadline.left_s())
    except RuntimeUnavailableError as error:
        table.eliminate(trial.name, error.problem)
        return table.update(trial.name, assessment=None)
    if found is None:
        return trial
    trial = table.update(trial.name, simulated=found)
    progress.note(f"{trial.name} {in_simulator(found)}")
    if not table.meets(trial):
        reason = f"{in_simulator(found)}; {points(table.goal.max_drop)} are allowed"
        return table.update(trial.name, status="short", reason=reason)
    surer = _surer(table, found)
    if surer is not None:
        reason = f"{in_simulator(found)}; {surer.name} holds on more"
        trial = table.update(trial.name, status="qualified", reason=reason)
    return trial


def _surer(table: TrialTable, found: Assessment) -> Trial | None:
    """One that holds in the simulator on more samples than `found`, which the end of the budget may have cut short:
    where it is not sure to hold, few samples may be luck."""
    if found.high <= table.goal.max_drop:
        return None
    return next((t for t in table.qualified() if t.simulated and t.simulated.samples > found.samples), None)


# The last race ends when what leads takes at most so much longer than any other.
_CLOSE = 0.02
_LONGEST_S = 4 * MOST_S
"""A last race on a busy machine."""
_SUPERLATIVES = {
    "latency": "fastest",
    "throughput": "fastest",
    "size": "smallest",
    "memory": "leanest",
    FLOAT_MACS: "one with the most MACs in int8",
}


def decide(
    table: TrialTable,
    evaluator: Evaluator,
    deadline: Deadline,
    threads: Sequence[int],
    baseline: Baseline,
    progress: Progress = SILENT,
) -> Baseline:
    """Race the best that qualify and choose one. Where none of them is fast enough, or others seem faster by an earlier
    race than the one that leads now, those that are left race the next best.

    The threads are chosen anew before: what the processors of this machine have to share may have changed. Where the
    evaluator has no clock, the cheapest that qualifies is chosen without a race.

    Returns:
        float32 in the last race; `baseline` where there was none.
    """
    if not evaluator.timed:
        confirm(table, evaluator, deadline, progress)
        _choose(table, table.qualified())
        return baseline
    known: set[str] = set()  # structures that were in a last race: each further one has others, so that it ends
    while finalists := _finalists(table, evaluator, known):
        seconds = deadline.left_s(MOST_S)
        # All that qualify get these threads: speeds with others must not be compared with what the race measures.
        remaining = [t for t in table.qualified() if t.name not in {f.name for f in finalists}]
        chosen = choose_threads(table, [*finalists, *remaining], evaluator, threads, seconds / 3, "last")
        finalists = [table[trial.name] for trial in finalists]
        raced = race_until_claimed(
            table,
            evaluator,
            deadline,
            finalists,
            chosen.count,
            tie=_CLOSE,
            seconds=seconds * 2 / 3,
            longest=_LONGEST_S,
        )
        baseline = Baseline(raced.timings[FLOAT], chosen, raced.settled, raced.histograms)
        for trial in table.qualified():
            if not not_slower(trial, strict=table.objective in BY_TIME):
                assert trial.timing is not None
                table.eliminate(trial.name, f"not faster than float32 beyond doubt: {times(trial.timing)}")
        structures = {structure_of(trial) for trial in finalists}
        ranked = [trial for trial in table.qualified() if structure_of(trial) in structures]
        tied = {structure_of(table[name]) for name in raced.tied} if table.objective in BY_TIME else set()
        known |= structures
        others = [t for t in table.qualified() if structure_of(t) not in known]
        if ranked and (deadline.passed() or not any(table.cheaper(other, ranked[0]) for other in others)):
            _choose(table, ranked, tied)
            break
    else:
        _time_nearest(table, evaluator, deadline, baseline.threads.count)
    return baseline


def _time_nearest(table: TrialTable, evaluator: Evaluator, deadline: Deadline, float_threads: int) -> None:
    """Where nothing is chosen: time what loses least, if it never was, so that what would be needed can be named."""
    measured = [t for t in table if t.candidate.quantized and t.assessment is not None and t.assessment.complete]
    near = min(measured, key=loss_of, default=None)
    if near is None or table.timed(near).timing is not None or deadline.passed():
        return
    race(table, evaluator, [near], float_threads, tie=ROUGHLY, seconds=deadline.left_s(MOST_S / 4))


def _finalists(table: TrialTable, evaluator: Evaluator, known: Collection[str]) -> list[Trial]:
    """Of each structure that qualifies the most accurate: those `known` from a last race, of the others the cheapest
    few that are not far behind, and all that were never timed; in a thorough search all."""
    best: dict[str, Trial] = {}
    for trial in sorted(table.qualified(), key=accuracy_key):
        best.setdefault(structure_of(trial), table.timed(trial))
    if table.objective == "memory":
        for key, trial in best.items():
            if trial.memory_bytes is None:
                peak = evaluator.memory(trial.candidate, trial.candidate.threads)
                best[key] = table.update(trial.name, memory_bytes=peak)
    new = [t for t in best.values() if t.timing is None]
    old = sorted((t for t in best.values() if t.timing is not None), key=table.cost)
    others = [t for t in old if structure_of(t) not in known]
    sure = [table.cost(t) for t in others if t.timing is not None and t.timing.verdict != UNKNOWN]
    most = FAR_BEHIND * min(sure, default=math.inf)
    near = [t for t in others if table.cost(t) <= most]
    few = others if table.goal.thorough else near[:RACED]
    return [*(t for t in old if structure_of(t) in known), *few, *new]


def _choose(table: TrialTable, ranked: Sequence[Trial], tied: Collection[str] = ()) -> None:
    """Choose the most accurate of the cheapest of `ranked`, which are sorted by cost. Others that qualify are costlier.

    Args:
        tied: structures whose speed cannot be distinguished from the fastest one's.
    """
    if not ranked:
        return
    cheapest = [t for t in ranked if not table.cheaper(ranked[0], t) or structure_of(t) in tied]
    winner = min(cheapest, key=accuracy_key)
    assert winner.assessment is not None
    for trial in table.qualified():
        earlier = ", by an earlier race" if trial not in ranked and table.objective in BY_TIME else ""
        table.update(trial.name, status="qualified", reason=_why_not(table, trial, winner, cheapest) + earlier)
    lost = in_simulator(winner.simulated) if winner.simulated is not None else loses(winner.assessment)
    why = f"the {_SUPERLATIVES[table.objective]} that keeps the accuracy asked for: {lost}"
    table.update(winner.name, status="chosen", reason=why)


def _why_not(table: TrialTable, trial: Trial, winner: Trial, cheapest: Sequence[Trial]) -> str:
    if structure_of(trial) == structure_of(winner):
        return f"as fast as {winner.name}, {less_accurate(trial, winner)}"
    if trial in cheapest:
        close = not (table.cheaper(winner, trial) or table.cheaper(trial, winner))
        which = f"within {TIE:.0%} of {winner.name}" if close else f"in speed not distinguishable from {winner.name}"
        return f"{which}, {less_accurate(trial, winner)}"
    if table.objective == FLOAT_MACS:
        return f"{table.cost(trial):.1%} of the MACs in float, {winner.name} {table.cost(winner):.1%}"
    times_what = {"size": "times larger than", "memory": "times the memory of"}
    share = table.cost(trial) / table.cost(winner)
    return f"{share:.2f} {times_what.get(table.objective, 'times the latency of')} {winner.name}"


_TRIED = 3


def fall_back(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, winner: Trial | None, float_threads: int
) -> str:
    """The name of the candidate that stands in for `winner`, of which the same file comes first; "" where the winner
    needs no plug-in, and where float32 has to do. Those that were dropped for a faster engine are measured now."""
    choice = winner.candidate.engine if winner is not None else None
    if winner is None or choice is None:
        return ""
    twin = winner.candidate.replace(name=winner.name.replace(f" in {choice.name}", ""), engine=None)
    if twin.quantized and twin.name not in table and not deadline.passed():
        build(table, evaluator, twin.replace(threads=0), "recovery", winner.name)
    own = [t for t in table if t.screening and t.candidate.engine is None and t.candidate.quantized]
    own.sort(key=lambda t: (not same_file(t, winner), table.cost(t)))
    for trial in own[:_TRIED]:
        if deadline.passed():
            break
        if trial.timing is None:
            race(table, evaluator, [trial], float_threads, tie=TIE, seconds=deadline.left_s(MOST_S / 4))
        if not not_slower(table[trial.name], strict=True):
            continue
        if trial.assessment is None or not trial.assessment.complete:
            found = evaluator.assess([trial.candidate], evaluator.total)
            trial = table.update(trial.name, assessment=found[trial.name])
        if table.meets(trial):
            role = f"the fall-back where {choice.engine.name} is not installed"
            reason = "; ".join(filter(None, (table[trial.name].reason, role)))
            return table.update(trial.name, status="qualified", reason=reason).name
    return ""
