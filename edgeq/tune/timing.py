"""Timing in a search: threads, one runner for each structure beside float32, and layers that integers make slower.

An integer kernel is not always the faster one: a convolution of three channels, or a depthwise one, can take twice as
long as in float. Which these are on this machine is read off the runtime's profile of both models. A layer in float
costs conversions at its borders, which the profile does not predict, so ever longer beginnings of the list, worst
first, are built and raced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq_device.claim import SLOWER, UNKNOWN

from edgeq.backends.base import Artifact
from edgeq.measure.coverage import KernelTime, kernel_times
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.report.tuning_record import Timing
from edgeq.run.session import SessionSettings, open_session
from edgeq.tune.engines import Field, drop_slower_twins, more_in_engines
from edgeq.tune.evaluator import FLOAT, Evaluator, Race, Runner
from edgeq.tune.explain import Trial, behind, relative_latency, times
from edgeq.tune.goal import Deadline
from edgeq.tune.screening import build
from edgeq.tune.sessions import Threads, choose_threads
from edgeq.tune.space import Candidate, engine_name, in_float
from edgeq.tune.trials import BY_TIME, ROUGHLY, TIE, TrialTable, sqnr_of, structure_of

MOST_S = 18.0
"""A stage of races that are not settled by then: what is left in doubt is close enough not to matter."""
RACED = 4
"""Candidates in the last race."""
# Times as fast as all in integers, with slow layers in float: 1.35 was seen.
_SAVED = 1.5
# Of MOST_S, for each of the first races: what they leave open the last one settles.
_FIRST_SHARE = 2 / 9


@dataclass(frozen=True)
class Baseline:
    """float32 with the threads that suit it best.

    Attributes:
        timing: None where nothing was timed.
        settled: whether the order of the race that it comes from is settled, as `Race` has it.
        histograms: of that race, as `Race` has them.
    """

    timing: Timing | None = None
    threads: Threads = field(default_factory=Threads)
    settled: bool = True
    histograms: Mapping[str, Any] = field(default_factory=dict)


def time_kernels(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, threads: Sequence[int], engines: Field
) -> Baseline:
    """Choose the threads, time every structure that is in the run, keep layers in float that are faster so, and drop
    what is slower than float32. Nothing is done where the evaluator has no clock.

    Args:
        engines: what is raced.
    """
    if not evaluator.timed or not table.alive():
        return Baseline()
    seconds = (1.0 if table.goal.thorough else _FIRST_SHARE) * deadline.left_s(MOST_S)
    for when in ("first", "again"):
        chosen = choose_threads(table, table.alive(), evaluator, threads, seconds, when)
        first = list({structure_of(t): t for t in reversed(table.alive())}.values())[::-1]
        raced = race(table, evaluator, first, chosen.count, tie=ROUGHLY, seconds=seconds)
        if chosen.hold(raced.timings[FLOAT]):
            break
    float_threads = chosen.count
    sources = [t.candidate for t in table.alive() if t.candidate.engine is None]
    for candidate in () if engines.own else sources:
        table.eliminate(candidate.name, "--engine leaves onnxruntime's own kernels out")
    drop_slower_twins(table, own=False)  # with some layers in float the own kernels may be ahead
    _race_variants(table, evaluator, sources, engines, float_threads, seconds)
    if table.goal.objective == "memory":
        for trial in first:
            peak = evaluator.memory(trial.candidate, table[trial.name].candidate.threads)
            for other in table.alive():
                if structure_of(other) == structure_of(trial):
                    table.update(other.name, memory_bytes=peak)
    for trial in table.alive():
        if trial.timing is not None and trial.timing.verdict == SLOWER:
            table.eliminate(trial.name, f"slower than float32: {times(trial.timing)}")
    return Baseline(raced.timings[FLOAT], chosen, raced.settled, raced.histograms)


def time_new(table: TrialTable, evaluator: Evaluator, deadline: Deadline, float_threads: int) -> None:
    """Time the structures that qualify and were never timed, roughly: to know whether others need be looked at."""
    if not evaluator.timed:
        return
    new = {structure_of(t): t for t in table.qualified() if table.timed(t).timing is None}
    if new:
        seconds = deadline.left_s(MOST_S / 4)
        race(table, evaluator, list(new.values()), float_threads, tie=ROUGHLY, seconds=seconds)


def race(
    table: TrialTable,
    evaluator: Evaluator,
    trials: Sequence[Trial],
    float_threads: int,
    *,
    tie: float,
    seconds: float,
) -> Race:
    """Time `trials` beside float32, and enter the timings in the table; other arguments as `Evaluator.time`. A thorough
    search settles the order of those within `tie` too."""
    tie = 0.0 if table.goal.thorough else tie
    runners: dict[str, Runner] = {FLOAT: (None, float_threads)}
    runners.update({t.name: (t.candidate, t.candidate.threads) for t in trials})
    found = evaluator.time(runners, FLOAT, tie=tie, seconds=seconds)
    for trial in trials:
        table.time(trial, found.timings[trial.name])
    return found


def race_until_claimed(
    table: TrialTable,
    evaluator: Evaluator,
    deadline: Deadline,
    trials: Sequence[Trial],
    float_threads: int,
    *,
    tie: float,
    seconds: float,
    longest: float,
) -> Race:
    """`race`; where the machine was too busy to claim the speed of one that may be the best, again and for twice as
    long, as far as the budget goes.

    Args:
        longest: seconds that the last of these races may take.
    """
    while True:
        raced = race(table, evaluator, trials, float_threads, tie=tie, seconds=seconds)
        seconds *= 2
        if not _open(table, [table[t.name] for t in trials]) or deadline.passed() or seconds > deadline.left_s(longest):
            return raced


def _open(table: TrialTable, trials: Sequence[Trial]) -> bool:
    """Whether one whose speed cannot be claimed may cost less than all that are faster than float32."""
    sure = [t for t in trials if not_slower(t, strict=table.objective in BY_TIME)]
    doubtful = [t for t in trials if t.timing is None or t.timing.verdict == UNKNOWN]
    return any(not any(table.cheaper(known, trial) for known in sure) for trial in doubtful)


def not_slower(trial: Trial, *, strict: bool) -> bool:
    """Whether it is faster than float32 beyond doubt; without `strict`, as fast within a tie is enough."""
    found = trial.timing.speedup.interval if trial.timing and trial.timing.speedup else None
    return found is not None and found[1] > (1 if strict else 1 / (1 + TIE))


def beginnings(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The first one, two, four ... names, and all."""
    sizes = [2**k for k in range(len(names).bit_length()) if 2**k < len(names)]
    return [tuple(names[:size]) for size in (*sizes, len(names)) if size]


def _race_variants(
    table: TrialTable,
    evaluator: Evaluator,
    sources: Sequence[Candidate],
    engines: Field,
    float_threads: int,
    seconds: float,
) -> None:
    """Time the fastest static kernel choice with its slow layers in float, and the other kernel choices in the engines
    where the first int8 candidate is not far behind. Of the forms with layers in float only the fastest is kept; where
    it is ahead of an engine, it runs there too."""
    family = _slow_layers_in_float(table, evaluator, float_threads)
    more = [c.name for c in more_in_engines(table, sources, engines) if build(table, evaluator, c)]
    if family or more:
        trials = [table[name] for name in (*family, *more)]
        raced = race(table, evaluator, trials, float_threads, tie=ROUGHLY, seconds=seconds)
    # One goes on even where the race shows nothing: every form would be built with all calibration methods.
    fastest = min((table[name] for name in family), key=relative_latency, default=None)
    for name in family:
        if fastest is not None and name != fastest.name:
            table.eliminate(name, behind(table[name], fastest, tied=name in raced.tied))
    drop_slower_twins(table)
    if fastest is not None and fastest.stage == "exclusion":
        _race_in_engines(table, evaluator, fastest, engines, float_threads, seconds)


def _race_in_engines(
    table: TrialTable, evaluator: Evaluator, trial: Trial, engines: Field, float_threads: int, seconds: float
) -> None:
    """Time `trial`, which has layers in float, in the engines where nothing is faster yet: which layers are slow was
    read off onnxruntime's own kernels. In a thorough search in all."""
    ahead = () if table.goal.thorough else (t for t in table.alive() if table.cheaper(t, trial))
    in_front = {engine_name(t.candidate) for t in ahead}
    twins = [c for c in more_in_engines(table, [trial.candidate], engines) if engine_name(c) not in in_front]
    made = [c.name for c in twins if build(table, evaluator, c)]
    if made:
        race(table, evaluator, [table[name] for name in made], float_threads, tie=ROUGHLY, seconds=seconds)
        drop_slower_twins(table)


def _slow_layers_in_float(table: TrialTable, evaluator: Evaluator, float_threads: int) -> list[str]:
    """Names of the fastest static kernel choice, of those as fast the most accurate, and of what was built of it with
    layers in float that integers make slower; none where that is not worth trying.

    Where size counts, it is only if the choice is not worth shipping otherwise.
    """
    # The profile that names slow layers is that of onnxruntime's own kernels.
    own = [t for t in table.alive() if t.timing and t.candidate.engine is None]
    static = [t for t in own if t.candidate.scheme.mode == "static" and not t.candidate.builder]
    least = min((relative_latency(t) for t in static), default=0.0)
    if not static or least > _SAVED * min(relative_latency(t) for t in table.alive()):
        return []
    # Kernel choices that differ in the values of weights alone are as fast, and not as accurate.
    base = max((t for t in static if relative_latency(t) <= least * (1 + ROUGHLY)), key=sqnr_of)
    if table.goal.objective in ("size", "memory") and not_slower(base, strict=False):
        return []
    slow = evaluator.slow_layers(base.candidate, float_threads)
    mixed = [in_float(base.candidate, nodes) for nodes in beginnings(slow)]
    made = [candidate.name for candidate in mixed if build(table, evaluator, candidate, "exclusion", base.name)]
    return [base.name, *made] if made else []


_LEAST_GAIN = 0.002
"""Share of float32's time that a layer must lose in integers to be looked at: less is noise of the profiler."""


def slow_layers(
    prepared: PreparedModel,
    artifact: Artifact,
    feed: Mapping[str, Any],
    *,
    float_threads: int,
    threads: int,
    opener: Callable[[Path, SessionSettings], Any] = open_session,
) -> tuple[str, ...]:
    """Names of layers of `artifact` that take longer than in `prepared`, which it was made from, worst first.

    Args:
        feed: one query's inputs.
        float_threads, threads: that the float model and the artifact run with.
        opener: see `edgeq.measure.coverage.profile`.
    """
    settings, quantized = SessionSettings(intra_op_threads=float_threads), artifact.settings(threads=threads)
    in_float = _by_layer(kernel_times(prepared.path, settings, feed, prepared.model, opener=opener))
    in_int8 = _by_layer(kernel_times(artifact.model, quantized, feed, prepared.model, opener=opener))
    macs = node_macs(prepared.model)
    layers = [node.name for node in prepared.model.graph if node.name and macs.get(node.name)]
    return slower_in_integers(layers, in_float, in_int8)


def slower_in_integers(
    names: Sequence[str], float_us: Mapping[str, float], int8_us: Mapping[str, float]
) -> tuple[str, ...]:
    """Those of `names` that take longer in integers, by what they lose, most first.

    Args:
        float_us, int8_us: microseconds by layer in each model; layers that are not in both are left out.
    """
    least = _LEAST_GAIN * sum(float_us.values())
    lost = {n: int8_us[n] - float_us[n] for n in names if n in float_us and n in int8_us}
    return tuple(sorted((n for n, us in lost.items() if us > least), key=lambda n: (-lost[n], n)))


def _by_layer(kernels: Sequence[KernelTime]) -> dict[str, float]:
    """Microseconds by source node: a layer may run as several kernels."""
    found: dict[str, float] = {}
    for kernel in kernels:
        found[kernel.name] = found.get(kernel.name, 0.0) + kernel.us
    return found
