"""Drop trials whose file runs better in another engine, or in another precision of the same engine."""

from __future__ import annotations

from edgeq.tuning.build import is_same_file
from edgeq.tuning.comparison import is_outrun
from edgeq.tuning.pace import EQUAL, SQNR_BEHIND_DB
from edgeq.tuning.sentences import describe_delay, describe_unclaimed
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Trial, Trials


def drop_slower_twins(trials: Trials, *, with_own_kernels: bool = True) -> None:
    """Drop a trial if its file runs faster in another engine, or in the same engine in another precision, unless its
    outputs are much closer to float32's. Also drop a trial in a lower precision if its file runs no faster than in the
    higher precision. If one of the two speeds cannot be claimed, keep both trials.

    Args:
        with_own_kernels: whether trials in onnxruntime's own kernels can be dropped as well.
    """
    candidates = [t for t in trials.alive() if with_own_kernels or t.candidate.engine is not None]
    # The slowest first, so that a trial is not kept for the sake of one that is dropped later.
    for trial in sorted(candidates, key=lambda t: t.latency, reverse=True):
        for twin in trials.alive():
            untimed = trial.timing is None or twin.timing is None or describe_unclaimed(trial, twin)
            if untimed or not is_same_file(trial, twin) or trial.sqnr_db >= twin.sqnr_db + SQNR_BEHIND_DB:
                continue
            lower = _has_lower_precision(trial.candidate, twin.candidate)
            if lower:
                gone = not _is_lower_worthwhile(trials, trial, twin)
            elif _has_lower_precision(twin.candidate, trial.candidate):
                gone = _is_lower_worthwhile(trials, twin, trial)
            else:
                gone = is_outrun(trial, twin, trials.pace.behind)
            if gone:
                why = describe_delay(trial, twin)
                trials.eliminate(trial.name, f"{why}, too little for its lower precision" if lower else why)
                break


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
