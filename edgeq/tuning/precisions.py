"""Drop trials whose file runs better in another precision of the same engine."""

from __future__ import annotations

from edgeq.tuning.build import is_same_file
from edgeq.tuning.pace import EQUAL, SQNR_BEHIND_DB
from edgeq.tuning.sentences import describe_delay, describe_unclaimed
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Trial, Trials


def drop_worse_precisions(trials: Trials) -> None:
    """Of two trials that run the same file in two precisions of an engine, drop the one in the lower precision if it is
    no faster, else the one in the higher precision. If one of the two speeds cannot be claimed, or the trial in the
    higher precision is much closer to float32, keep both.
    """
    pairs = ((a, b) for a in trials.alive() for b in trials.alive() if _has_lower_precision(a.candidate, b.candidate))
    for lower, higher in pairs:
        timed = lower.timing is not None and higher.timing is not None and not describe_unclaimed(lower, higher)
        gone = trials[lower.name].reason or trials[higher.name].reason
        if gone or not timed or not is_same_file(lower, higher):
            continue
        if not _is_lower_worthwhile(trials, lower, higher):
            why = f"{describe_delay(lower, higher)}, too little for its lower precision"
            trials.eliminate(lower.name, why)
        elif higher.sqnr_db < lower.sqnr_db + SQNR_BEHIND_DB:
            trials.eliminate(higher.name, describe_delay(higher, lower))


def _is_lower_worthwhile(trials: Trials, lower: Trial, higher: Trial) -> bool:
    """Return whether the lower of two precisions is certainly faster for this file. If the float model was timed in
    both precisions, it must be certainly faster in the lower one as well.

    If a file is all in int8, it can be faster in one precision only by chance. But the precision chosen here is also
    used for layers that recoveries later put into float.
    """
    floats = [t for t in trials if not t.candidate.quantized and t.timing is not None]
    float_pair = [t for trial in (lower, higher) for t in floats if t.candidate.engine == trial.candidate.engine]
    return _is_surely_faster(lower, higher) and (len(float_pair) < 2 or _is_surely_faster(*float_pair))


def _has_lower_precision(candidate: Candidate, twin: Candidate) -> bool:
    """Return whether both candidates are for the same engine, and `candidate` has the lower precision."""
    engine, twin_engine = candidate.engine, twin.engine
    if engine is None or twin_engine is None or engine.engine.name != twin_engine.engine.name:
        return False
    order = list(engine.engine.precisions)
    # The description of an engine lists its precisions from the highest to the lowest.
    return order.index(engine.precision) > order.index(twin_engine.precision)


def _is_surely_faster(trial: Trial, rival: Trial) -> bool:
    """Return whether `trial` is certainly faster than `rival`. The lower end of the speed interval of `trial` must be
    above the median of `rival`, and the medians must differ by more than the share that counts as equal.
    """
    interval, rival_interval = (
        t.timing.speedup.interval if t.timing and t.timing.speedup else None for t in (trial, rival)
    )
    return (
        interval is not None
        and rival_interval is not None
        and interval[1] > rival_interval[0]
        and trial.latency * (1 + EQUAL) < rival.latency
    )
