"""Time different numbers of threads, one candidate of each structure against float32, and variants with slow integer
layers in float.

Integer kernels are not always faster: a convolution of three channels, or a depthwise convolution, can take twice as
long in integers as in float. The runtime's profile of both models shows which layers are slower on this machine. A
layer in float costs conversions at its borders, which the profile does not predict. So edgeq sorts these layers, the
worst first, and builds and times longer and longer prefixes of the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeq_device.measure.claim import FEWEST_PAIRS, SLOWER, UNKNOWN

from edgeq.measure.structure_timing import StructureTiming
from edgeq.tuning.build import build
from edgeq.tuning.engines import Field, find_engine_candidates
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.pace import BEHIND, EQUAL
from edgeq.tuning.precisions import drop_worse_precisions
from edgeq.tuning.sentences import describe_delay, describe_speed_against_float
from edgeq.tuning.space import Candidate, engine_name, in_float
from edgeq.tuning.trials import FLOAT, Trial, Trials, group_by_structure

RACE_S = 18.0
"""Seconds after which a stage of races ends. Runners whose order is still in doubt are then close enough."""
SHORT_S = RACE_S / 4
"""Seconds of a race that only decides whether a candidate deserves more time."""
LONGEST_S = 2 * RACE_S
"""Largest number of seconds of a last race, on a busy machine."""


def time_kernels(trials: Trials, threads: Sequence[int], engines: Field) -> None:
    """Choose the threads, and time every structure in the run. Keep layers in float that are faster in float, and drop
    candidates that are slower than float32.

    Args:
        engines: the engines to time.
    """
    if not trials.alive():
        return
    seconds = trials.pace.first_races * trials.deadline.remaining_s(RACE_S)
    for when in ("first", "again"):
        float_ms = choose_threads(trials, trials.alive(), threads, seconds, when)
        runners = [group[0] for group in group_by_structure(trials.alive())]
        raced = race(trials, runners, seconds)
        if is_unchanged(float_ms, raced.timings[FLOAT]):
            break
    sources = [t.candidate for t in trials.alive() if t.candidate.engine is None]
    for candidate in () if engines.own else sources:
        trials.eliminate(candidate.name, "⟨engine⟩ leaves onnxruntime's own kernels out")
    drop_worse_precisions(trials)
    _race_variants(trials, sources, engines, seconds)
    if trials.objective == "memory":
        for trial in runners:
            peak = trials.evaluator.memory(trial.candidate, trials[trial.name].candidate.threads)
            for sibling in trials.alive():
                if sibling.structure == trial.structure:
                    trials.update(sibling.name, memory_bytes=peak)
    for trial in trials.alive():
        if trial.verdict == SLOWER:
            trials.eliminate(trial.name, describe_speed_against_float(trial.timing))
    trials.raced = raced


def race_new(trials: Trials) -> None:
    """Time the structures that qualify and were never timed, to see whether further candidates need to be tried."""
    new = [t for t in trials.qualified() if trials.with_timing(t).timing is None]
    if new:
        race(trials, [group[0] for group in group_by_structure(new)], trials.deadline.remaining_s(SHORT_S))


def race(trials: Trials, runners: Sequence[Trial], seconds: float, *, rough: bool = True) -> Race:
    """Time `runners` against float32, and record their timings.

    Args:
        rough: see `Evaluator.time`. If the search's pace counts no speeds as equal, no race is rough.
    """
    if trials.evaluator.counts:
        timings = {trial.name: trial.timing for trial in runners if trial.timing is not None}
        return Race({FLOAT: StructureTiming({"p50_ms": 1.0}), **timings}, settled=True)
    named: dict[str, Runner] = {FLOAT: (None, trials.float_threads)}
    named.update({t.name: (t.candidate, t.candidate.threads) for t in runners})
    tie = trials.pace.equal
    figures = trials.evaluator.time(named, FLOAT, tie=tie, seconds=seconds, rough=rough and tie > 0)
    for trial in runners:
        trials.record_timing(trial, figures.timings[trial.name])
    return figures


def race_until_claimed(
    trials: Trials, runners: Sequence[Trial], seconds: float, longest: float, *, rough: bool
) -> Race:
    """Time runners until the speed of every runner that may be the best can be claimed.

    If the machine is too busy for that, repeat the race for twice as long. Stop when the budget ends, or when another
    race is unlikely to help because fewer than half of the necessary pairs of runs were completed.

    Args:
        longest: largest number of seconds for the last of these races.
    """
    while True:
        raced = race(trials, runners, seconds, rough=rough)
        seconds *= 2
        now = [trials[t.name] for t in runners]
        sure = [t for t in now if is_not_slower(trials, t)]
        measurable = (t for t in now if t.timing and t.timing.speedup and 2 * t.timing.speedup.pairs >= FEWEST_PAIRS)
        unclear = (t for t in measurable if t.verdict == UNKNOWN)
        undecided = any(not any(trials.is_cheaper(rival, trial) for rival in sure) for trial in unclear)
        if not undecided or trials.deadline.passed() or seconds > trials.deadline.remaining_s(longest):
            return raced


def is_not_slower(trials: Trials, trial: Trial) -> bool:
    """Return whether a trial is certainly faster than float32. If speed is not the objective, equal speed is enough."""
    interval = trial.timing.speedup.interval if trial.timing and trial.timing.speedup else None
    return interval is not None and interval[1] > (1 if trials.by_time else 1 / (1 + EQUAL))


def list_prefixes(names: Sequence[str]) -> list[tuple[str, ...]]:
    """List the prefixes of `names` with 1, 2, 4, ... names, and all names."""
    sizes = [2**k for k in range(len(names).bit_length()) if 2**k < len(names)]
    return [tuple(names[:size]) for size in (*sizes, len(names)) if size]


def _race_variants(trials: Trials, sources: Sequence[Candidate], engines: Field, seconds: float) -> None:
    """Time variants of the kernel choices: the fastest static choice with its slow layers in float, and all choices in
    each engine whose first int8 candidate is not slower than float32.

    Of the forms with layers in float, only the fastest is kept. The other engines run it as well: its slow layers were
    found in onnxruntime's own kernels, but leaving them in float may help in the other engines too.
    """
    family = _build_slow_layers_in_float(trials)
    if family:
        race(trials, [trials[name] for name in family], seconds)
        # Keep only one form, even if the race shows no difference. Otherwise every form would be built with all
        # calibration methods.
        fastest = min((trials[name] for name in family), key=lambda t: t.latency)
        for name in family:
            if name != fastest.name:
                trials.eliminate(name, describe_delay(trials[name], fastest))
        sources = [*sources, fastest.candidate]
    more = [c.name for c in find_engine_candidates(trials, sources, engines) if build(trials, c)]
    if more:
        race(trials, [trials[name] for name in more], seconds)
    drop_worse_precisions(trials)


def _build_slow_layers_in_float(trials: Trials) -> list[str]:
    """Take the most accurate static kernel choice that is not behind the fastest one, and build it with those layers in
    float that are slower in integers. Return the name of the choice and the names of these builds.

    Return nothing if there is no such layer. Also return nothing if size or memory is the objective and the choice is
    good enough as it is.
    """
    # Slow layers are found in the profile of onnxruntime's own kernels.
    timed = [t for t in trials.alive() if t.timing and t.candidate.engine is None]
    static = [t for t in timed if t.candidate.scheme.mode == "static" and not t.candidate.builder]
    if not static:
        return []
    # Kernel choices that differ only in the values of weights are about as fast, but differ in accuracy. The first
    # races are rough and cannot show smaller differences in speed than this.
    lowest_latency = min(t.latency for t in static)
    base = max((t for t in static if t.latency <= lowest_latency * (1 + BEHIND)), key=lambda t: t.sqnr_db)
    if trials.objective in ("size", "memory") and is_not_slower(trials, base):
        return []
    slow = trials.evaluator.slow_layers(base.candidate, trials.float_threads)
    mixed = [in_float(base.candidate, nodes) for nodes in list_prefixes(slow)]
    names = [candidate.name for candidate in mixed if build(trials, candidate, "exclusion", base.name)]
    return [base.name, *names] if names else []


def choose_threads(
    trials: Trials, candidates: Sequence[Trial], threads: Sequence[int], seconds: float, when: str
) -> float:
    """Choose the number of threads with which float32 is fastest, and return float32's median latency in milliseconds.
    Return 0 if nothing was measured, or if no number could be chosen.

    All trials of an engine get the number with which the first of them is fastest. Among numbers that are about equally
    fast, the smallest is chosen. A plug-in gets its number without a race if one number is clearly best for everything
    in onnxruntime's own kernels. On a machine that is too busy to show a difference, all trials get the first of
    `threads`.

    Args:
        when: part of the runners' names, so that a journal distinguishes a later race of the same runners.
    """
    trials.float_threads = threads[0]
    if len(threads) == 1 or trials.evaluator.counts:
        return 0.0
    groups: dict[str, Candidate | None] = {FLOAT: None}
    for trial in sorted(candidates, key=lambda t: t.candidate.engine is not None):
        groups.setdefault(_kernel_kind(trial), trial.candidate)
    best: dict[str, int] = {}
    float_ms, clear = 0.0, True
    for kind, candidate in groups.items():
        if candidate is not None and candidate.engine is not None and clear and len(set(best.values())) == 1:
            best[kind] = best[FLOAT]
            continue
        # Each kind of runner is timed separately, because its best number of threads does not depend on which kind is
        # faster.
        runners: dict[str, Runner] = {f"{kind} {n} {when}": (candidate, n) for n in threads}
        baseline, each_s = next(iter(runners)), seconds / len(groups)
        timings = trials.evaluator.time(runners, baseline, tie=EQUAL, seconds=each_s, rough=True).timings
        if any(timing.speedup is not None and timing.verdict == UNKNOWN for timing in timings.values()):
            # Choose nothing: other programs load the cores now, but perhaps not when the model is in use.
            return 0.0
        latencies = {n: timings[f"{kind} {n} {when}"].latency for n in threads}
        # Do not use the median: it hides the runs in which a thread waits for another thread whose core is busy with
        # other work.
        mean = {n: latency["mean_ms"] for n, latency in latencies.items()}
        fewest = [n for n in threads if mean[n] <= min(mean.values()) * (1 + EQUAL)]
        best[kind] = min(fewest, key=lambda n: n if n else float("inf"))
        float_ms = float_ms or latencies[best[kind]]["p50_ms"]
        runner_up_ms = min(mean[n] for n in threads if n != best[kind])
        clear = clear and runner_up_ms > (1 + trials.pace.threads) * mean[best[kind]]
    for trial in candidates:
        trials.update(trial.name, candidate=trial.candidate.replace(threads=best[_kernel_kind(trial)]))
    trials.float_threads = best[FLOAT]
    return float_ms


def _kernel_kind(trial: Trial) -> str:
    return engine_name(trial.candidate) if trial.candidate.engine else "int8"


def is_unchanged(float_ms: float, float32: StructureTiming) -> bool:
    """Return whether `float32` still has about the latency `float_ms` that it had when its threads were chosen. If two
    processors begin or cease to share a core, the latency changes, and another number of threads may be better.
    """
    now = float32.latency["p50_ms"]
    return not float_ms or max(now / float_ms, float_ms / now) <= 1 + BEHIND
