"""Race threads, one runner for each structure next to float32, and layers that integers make slower.

An integer kernel is not always the faster one: a convolution of three channels, or a depthwise one, can take twice as
long as in float. Which these are on this machine is read off the runtime's profile of both models. A layer in float
costs conversions at its borders, which the profile does not predict, so ever longer beginnings of the list, worst
first, are built and raced."""

from __future__ import annotations

from collections.abc import Sequence

from edgeq_device.claim import FEWEST_PAIRS, SLOWER, UNKNOWN

from edgeq.report.tuning_record import Timing
from edgeq.tune.build import build
from edgeq.tune.engines import Field, drop_slower_twins, more_in_engines
from edgeq.tune.goal import BEHIND, EQUAL
from edgeq.tune.space import Candidate, engine_name, in_float
from edgeq.tune.trials import FLOAT, Race, Runner, Trial, Trials, behind, by_structure, times

RACE_S = 18.0
"""Seconds of a stage of races that are not settled by then: what is left in doubt is close enough not to matter."""
SHORT_S = RACE_S / 4
"""Seconds of a race that only has to show whether something is worth more."""
LONGEST_S = 4 * RACE_S
"""Seconds of a last race on a busy machine."""


def time_kernels(trials: Trials, threads: Sequence[int], engines: Field) -> None:
    """Choose the threads, time every structure that is in the run, keep layers in float that are faster so, and drop
    what is slower than float32.

    Args:
        engines: what is raced.
    """
    if not trials.alive():
        return
    seconds = trials.pace.first_races * trials.deadline.left_s(RACE_S)
    for when in ("first", "again"):
        float_ms = choose_threads(trials, trials.alive(), threads, seconds, when)
        first = [group[0] for group in by_structure(trials.alive())]
        raced = race(trials, first, seconds)
        if holds(float_ms, raced.timings[FLOAT]):
            break
    sources = [t.candidate for t in trials.alive() if t.candidate.engine is None]
    for candidate in () if engines.own else sources:
        trials.eliminate(candidate.name, "--engine leaves onnxruntime's own kernels out")
    drop_slower_twins(trials, own=False)  # with some layers in float the own kernels may be ahead
    _race_variants(trials, sources, engines, seconds)
    if trials.objective == "memory":
        for trial in first:
            peak = trials.evaluator.memory(trial.candidate, trials[trial.name].candidate.threads)
            for other in trials.alive():
                if other.structure == trial.structure:
                    trials.update(other.name, memory_bytes=peak)
    for trial in trials.alive():
        if trial.verdict == SLOWER:
            trials.eliminate(trial.name, f"slower than float32: {times(trial.timing)}")
    trials.raced = raced


def race_new(trials: Trials) -> None:
    """Time the structures that qualify and were never timed: to know whether others need be looked at."""
    new = [t for t in trials.qualified() if trials.timed(t).timing is None]
    if new:
        race(trials, [group[0] for group in by_structure(new)], trials.deadline.left_s(SHORT_S))


def race(trials: Trials, runners: Sequence[Trial], seconds: float, *, rough: bool = True) -> Race:
    """Time `runners` against float32, and enter their timings.

    Args:
        rough: as `Evaluator.time` has it; where nothing is equal, no race is rough.
    """
    if trials.evaluator.counts:
        known = {trial.name: trial.timing for trial in runners if trial.timing is not None}
        return Race({FLOAT: Timing({"p50_ms": 1.0}), **known}, settled=True)
    named: dict[str, Runner] = {FLOAT: (None, trials.float_threads)}
    named.update({t.name: (t.candidate, t.candidate.threads) for t in runners})
    tie = trials.pace.equal
    found = trials.evaluator.time(named, FLOAT, tie=tie, seconds=seconds, rough=rough and tie > 0)
    for trial in runners:
        trials.time(trial, found.timings[trial.name])
    return found


def race_until_claimed(
    trials: Trials, runners: Sequence[Trial], seconds: float, longest: float, *, rough: bool
) -> Race:
    """Race; where the machine was too busy to claim the speed of one that may be the best, again and for twice as long,
    as far as the budget goes and that may help: half of the pairs of runs that it takes have come together.

    Args:
        longest: seconds that the last of these races may take.
    """
    while True:
        raced = race(trials, runners, seconds, rough=rough)
        seconds *= 2
        now = [trials[t.name] for t in runners]
        sure = [t for t in now if not_slower(trials, t)]
        near = (t for t in now if t.timing and t.timing.speedup and 2 * t.timing.speedup.pairs >= FEWEST_PAIRS)
        unclear = (t for t in near if t.verdict == UNKNOWN)
        open_ = any(not any(trials.cheaper(known, trial) for known in sure) for trial in unclear)
        if not open_ or trials.deadline.passed() or seconds > trials.deadline.left_s(longest):
            return raced


def not_slower(trials: Trials, trial: Trial) -> bool:
    """Return whether it is faster than float32 beyond doubt; where speed is not the objective, as fast is enough."""
    found = trial.timing.speedup.interval if trial.timing and trial.timing.speedup else None
    return found is not None and found[1] > (1 if trials.by_time else 1 / (1 + EQUAL))


def beginnings(names: Sequence[str]) -> list[tuple[str, ...]]:
    """List the first one, two, four ... names, and all."""
    sizes = [2**k for k in range(len(names).bit_length()) if 2**k < len(names)]
    return [tuple(names[:size]) for size in (*sizes, len(names)) if size]


def _race_variants(trials: Trials, sources: Sequence[Candidate], engines: Field, seconds: float) -> None:
    """Time the fastest static kernel choice with its slow layers in float, and the other kernel choices in the engines
    where the first int8 candidate is not behind. Of the forms with layers in float only the fastest is kept; where no
    engine is ahead of it, it runs there too: which layers are slow was read off onnxruntime's own kernels."""
    family = _slow_layers_in_float(trials)
    more = [c.name for c in more_in_engines(trials, sources, engines) if build(trials, c)]
    if family or more:
        race(trials, [trials[name] for name in (*family, *more)], seconds)
    # One goes on even where the race shows nothing: every form would be built with all calibration methods.
    fastest = min((trials[name] for name in family), key=lambda t: t.latency, default=None)
    for name in family:
        if fastest is not None and name != fastest.name:
            trials.eliminate(name, behind(trials[name], fastest))
    drop_slower_twins(trials)
    if fastest is None or fastest.stage != "exclusion":
        return
    in_front = {
        engine_name(t.candidate) for t in trials.alive() if t.latency * (1 + trials.pace.twin) < fastest.latency
    }
    twins = [c for c in more_in_engines(trials, [fastest.candidate], engines) if engine_name(c) not in in_front]
    made = [c.name for c in twins if build(trials, c)]
    if made:
        race(trials, [trials[name] for name in made], seconds)
        drop_slower_twins(trials)


def _slow_layers_in_float(trials: Trials) -> list[str]:
    """Return the name of the most accurate static kernel choice that is not behind the fastest one, and of what was
    built of it with layers in float that integers make slower; nothing where that is not worth trying: there is no such
    layer, or size counts and the choice is worth shipping as it is."""
    # The profile that names slow layers is that of onnxruntime's own kernels.
    own = [t for t in trials.alive() if t.timing and t.candidate.engine is None]
    static = [t for t in own if t.candidate.scheme.mode == "static" and not t.candidate.builder]
    if not static:
        return []
    # Kernel choices that differ in the values of weights alone are about as fast, and not as accurate. The first races
    # are rough: they do not tell smaller differences than this apart.
    least = min(t.latency for t in static)
    base = max((t for t in static if t.latency <= least * (1 + BEHIND)), key=lambda t: t.sqnr_db)
    if trials.objective in ("size", "memory") and not_slower(trials, base):
        return []
    slow = trials.evaluator.slow_layers(base.candidate, trials.float_threads)
    mixed = [in_float(base.candidate, nodes) for nodes in beginnings(slow)]
    made = [candidate.name for candidate in mixed if build(trials, candidate, "exclusion", base.name)]
    return [base.name, *made] if made else []


def choose_threads(
    trials: Trials, candidates: Sequence[Trial], threads: Sequence[int], seconds: float, when: str
) -> float:
    """Choose the threads that suit float32 best, and return its median latency with them; 0 where there is no choice.

    The trials of each engine get those that suit the first of them best; more of them only where they pay. A plug-in's
    are not raced where one number clearly suits all that onnxruntime's own kernels run. On a machine that is too busy
    to see what pays they get the first of `threads`.

    Args:
        when: part of the runners' names, by which a journal distinguishes a later race of the same ones.
    """
    trials.float_threads = threads[0]
    if len(threads) == 1 or trials.evaluator.counts:
        return 0.0
    groups: dict[str, Candidate | None] = {FLOAT: None}
    for trial in sorted(candidates, key=lambda t: t.candidate.engine is not None):
        groups.setdefault(_kind(trial), trial.candidate)
    best: dict[str, int] = {}
    float_ms, clear = 0.0, True
    for kind, candidate in groups.items():
        if candidate is not None and candidate.engine is not None and clear and len(set(best.values())) == 1:
            best[kind] = best[FLOAT]
            continue
        # A race of their own: which number suits one kind says nothing about the order of the kinds.
        runners: dict[str, Runner] = {f"{kind} {n} {when}": (candidate, n) for n in threads}
        first, each_s = next(iter(runners)), seconds / len(groups)
        timings = trials.evaluator.time(runners, first, tie=EQUAL, seconds=each_s, rough=True).timings
        if any(timing.speedup is not None and timing.verdict == UNKNOWN for timing in timings.values()):
            # What others leave of the cores now says nothing about the device at work: the choice stays the device's.
            return 0.0
        latencies = {n: timings[f"{kind} {n} {when}"].latency for n in threads}
        # Not the median: it hides the runs in which one thread waits for another on a core that is busy elsewhere.
        mean = {n: latency["mean_ms"] for n, latency in latencies.items()}
        fewest = [n for n in threads if mean[n] <= min(mean.values()) * (1 + EQUAL)]
        best[kind] = min(fewest, key=lambda n: n if n else float("inf"))
        float_ms = float_ms or latencies[best[kind]]["p50_ms"]
        others = min(mean[n] for n in threads if n != best[kind])
        clear = clear and others > (1 + trials.pace.threads) * mean[best[kind]]
    for trial in candidates:
        trials.update(trial.name, candidate=trial.candidate.replace(threads=best[_kind(trial)]))
    trials.float_threads = best[FLOAT]
    return float_ms


def _kind(trial: Trial) -> str:
    return engine_name(trial.candidate) if trial.candidate.engine else "int8"


def holds(float_ms: float, float32: Timing) -> bool:
    """Return whether `float32` still has about the latency `float_ms` that it had when its threads were chosen. Two
    processors that begin to share a core, or cease to, make it another one, and other numbers of threads better."""
    now = float32.latency["p50_ms"]
    return not float_ms or max(now / float_ms, float_ms / now) <= 1 + BEHIND
