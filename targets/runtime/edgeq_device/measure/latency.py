"""Time runners side by side: warm up until they are stable, then run interleaved bursts, so that noise affects all
alike.

A runner is a function without arguments that runs one query. Each round gives each runner a short burst of consecutive
runs, in an order shuffled by a seed. The first runs of a burst are not recorded. A runner for which a single run takes
longer than a burst gets one run a round, which is plain interleaving.

Bursts are better than single runs in turn, because the runs of a deployed model follow one another. A run right after
another model's has to refill the caches, which made a model of 1 ms 5 to 20 % slower. It also shares its cores with
that model's worker threads, which keep spinning for a while.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np

from edgeq_device.measure.watch import MachineWatch

_BARS = " ▁▂▃▄▅▆▇█"
# One character each, so that a histogram fits into a line of a terminal.
_BINS = 40


def percentile(ordered: np.ndarray, fraction: float) -> float:
    """Return the latency at 0-based position floor(fraction x n) of n latencies in ascending order.

    This is MLPerf LoadGen's definition. It gives a latency that was observed, never an interpolation. At least a share
    `fraction` of the latencies are less than or equal to it. If n <= 1 / (1 - fraction), it is the largest latency.

    Raises:
        ValueError: there are no latencies.
    """
    if len(ordered) == 0:
        raise ValueError("no latencies to take a percentile of")
    # Add 1e-9 before rounding down: 0.29 * 100 is 28.999999999999996, and 0.07 * 100 is 7.000000000000001.
    return float(ordered[min(len(ordered) - 1, int(fraction * len(ordered) + 1e-9))])


@dataclass(frozen=True, eq=False)
class Distribution:
    """Hold the latencies of one runner in the order of measurement.

    Attributes:
        samples_ms: float64[n], n >= 1: milliseconds of each query.
        rounds: int64[r]: position in `samples_ms` at which each interleaved round starts; rounds[0] is 0. Runners that
            were measured together have the same number of rounds, and are compared round by round. Default: each query
            is a round.
        samples_per_query: number of model samples in one query.
        elapsed_s: wall-clock seconds for the throughput; default: the sum of the latencies.
        disturbed: bool[n]: True for runs during which a thread of the process waited for a core; empty if unknown.
        busy: share of the machine's time that others used or wanted meanwhile, 0 to 1; 0 if unknown.
        sessions: number of sessions; round i ran in session i modulo this number.
        stolen: part of `busy` that a virtual machine's host took.
    """

    samples_ms: np.ndarray
    rounds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    samples_per_query: int = 1
    elapsed_s: float = 0.0
    disturbed: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    busy: float = 0.0
    sessions: int = 1
    stolen: float = 0.0
    _ordered: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        samples = np.asarray(self.samples_ms, np.float64)
        if samples.ndim != 1 or samples.size == 0:
            raise ValueError("a distribution needs a list of at least one latency")
        if not np.all(np.isfinite(samples)) or samples.min() < 0:
            raise ValueError("latencies must be finite and not negative")
        rounds = np.asarray(self.rounds, np.int64)
        if rounds.size == 0:
            rounds = np.arange(samples.size, dtype=np.int64)
        if rounds[0] != 0 or rounds[-1] >= samples.size or np.any(np.diff(rounds) <= 0):
            raise ValueError("rounds must start at 0 and rise within the latencies")
        disturbed = np.asarray(self.disturbed, bool)
        if disturbed.size not in (0, samples.size):
            raise ValueError("there must be as many marks of disturbance as latencies")
        elapsed_s = self.elapsed_s or float(samples.sum()) / 1e3
        fields = {"samples_ms": samples, "rounds": rounds, "elapsed_s": elapsed_s, "disturbed": disturbed}
        for name, value in {**fields, "_ordered": np.sort(samples)}.items():
            object.__setattr__(self, name, value)

    @property
    def count(self) -> int:
        """Return the number of latencies: queries, not model samples."""
        return int(self.samples_ms.size)

    @property
    def p50(self) -> float:
        """Return the median latency in milliseconds. It was observed, not interpolated (see `percentile`)."""
        return percentile(self._ordered, 0.5)

    @property
    def p99(self) -> float:
        """Return the latency in milliseconds that 99 % of the queries do not exceed."""
        return percentile(self._ordered, 0.99)

    @property
    def p999(self) -> float:
        """Return the latency in milliseconds that 99.9 % of the queries do not exceed."""
        return percentile(self._ordered, 0.999)

    @property
    def minimum(self) -> float:
        """Return the shortest latency in milliseconds."""
        return float(self._ordered[0])

    @property
    def disturbed_share(self) -> float:
        """Return the share of queries that were disturbed, 0 to 1. Return 0 if it is unknown which ones were."""
        return float(self.disturbed.mean()) if self.disturbed.size else 0.0

    @property
    def waiting_share(self) -> float:
        """Return the share of the time by which disturbed queries exceed the median of the others, 0 to 1. A wait of
        some microseconds marks a short query as disturbed, but takes hardly any time.
        """
        if not self.disturbed_share:
            return 0.0
        excess = np.maximum(self.samples_ms[self.disturbed] - self.drop_disturbed().p50, 0.0)
        return float(excess.sum() / max(self.samples_ms.sum(), 1e-12))

    def drop_disturbed(self) -> Distribution:
        """Return only the queries that were not disturbed. Return all queries if all were disturbed, or if it is
        unknown which ones were.
        """
        if not 0 < self.disturbed_share < 1:
            return self
        samples = self.samples_ms[~self.disturbed]
        return Distribution(samples, samples_per_query=self.samples_per_query, busy=self.busy, stolen=self.stolen)

    def compute_round_medians(self) -> np.ndarray:
        """Return float64[r]: the median latency of each round in milliseconds, without disturbed queries. The median is
        NaN if all queries of the round were disturbed.
        """
        samples = np.where(self.disturbed, np.nan, self.samples_ms) if self.disturbed.size else self.samples_ms
        ends = np.append(self.rounds[1:], self.count)
        if np.all(ends - self.rounds == 1):
            return samples
        rounds = [samples[a:b][~np.isnan(samples[a:b])] for a, b in zip(self.rounds, ends)]
        return np.array([np.median(latencies) if latencies.size else np.nan for latencies in rounds])

    def to_dict(self) -> Dict[str, float]:
        """Return the figures under stable names: latencies in milliseconds, throughput in model samples a second.

        "cv" is the population standard deviation divided by the mean, or 0 if the mean is 0.
        """
        mean, samples = float(self.samples_ms.mean()), self.count * self.samples_per_query
        return {
            "count": self.count,
            "min_ms": self.minimum,
            "p50_ms": self.p50,
            "p90_ms": percentile(self._ordered, 0.9),
            "p99_ms": self.p99,
            "p999_ms": self.p999,
            "max_ms": float(self._ordered[-1]),
            "mean_ms": mean,
            "cv": float(self.samples_ms.std() / mean) if mean > 0 else 0.0,
            "samples_per_s": samples / self.elapsed_s if self.elapsed_s > 0 else 0.0,
        }


def compute_shared_edges(distributions: Sequence[Distribution]) -> np.ndarray:
    """Return float64[41]: histogram edges, evenly spaced in log(milliseconds), from the smallest latency to the largest
    p99.9.
    """
    low = max(min(d.minimum for d in distributions), 1e-6)
    # Up to p99.9, because one stray latency would squeeze all others into a few bins.
    high = max(max(d.p999 for d in distributions), low * 1.01)
    return np.geomspace(low, high, _BINS + 1)


def count_bins(distribution: Distribution, edges: np.ndarray) -> List[int]:
    """Return how many latencies are between successive `edges`. Latencies outside the edges count in the first or last
    bin.
    """
    counts, _ = np.histogram(np.clip(distribution.samples_ms, edges[0], edges[-1]), edges)
    return [int(c) for c in counts]


def draw_sparkline(counts: Sequence[int]) -> str:
    """Return one character for each bin. Its height shows the bin's share of the fullest bin. A bin that is not empty
    is never blank.
    """
    top = max(counts) if len(counts) else 0
    return "".join(" " if c == 0 else _BARS[max(1, round(8 * c / top))] for c in counts)


Clock = Callable[[], float]
"""Function that returns seconds from an arbitrary start, and never goes back."""

Runner = Callable[[], object]
"""Function that runs one query. A runner in another process also has a method `burst`, which leaves out the time of
communication. The method works like the function `run_burst`, but lacks the first and the last argument."""
Runners = Union[Runner, Sequence[Runner]]
"""One runner, or several runners of the same model, which take turns. Each has its own session, because the place of a
session in memory changes the speed of a small model by up to a fifth."""


Settled = Callable[[Mapping[str, Distribution], int], bool]
"""Function of the latencies so far, by name, and the number of the look, from 1. It returns whether they suffice."""


@dataclass(frozen=True)
class WarmUp:
    """Define when a runner counts as warm: the medians of the last two windows of runs differ by at most `tolerance`.

    Attributes:
        window: number of runs in a window.
        tolerance: largest relative difference between the two medians.
        min_s: minimum seconds (clock governors need some tenths of a second to react).
        max_s: maximum seconds. After this time the runner is measured anyway, and reported as not stable.
        max_runs: maximum number of runs.
    """

    window: int = 10
    tolerance: float = 0.05
    min_s: float = 0.3
    max_s: float = 5.0
    max_runs: int = 100_000


@dataclass(frozen=True)
class WarmedUp:
    """Record the runs and seconds of a warm-up, and whether the latency became stable."""

    runs: int
    seconds: float
    stable: bool


def _as_sequence(runners: Runners) -> Sequence[Runner]:
    return (runners,) if callable(runners) else runners


def warm_up_all(runners: Iterable[Runners], settings: Optional[WarmUp], clock: Clock) -> None:
    """Warm up every runner. The sessions of a runner share the seconds of its warm-up. Without settings, do nothing."""
    if settings is None:
        return
    for run in runners:
        sessions = _as_sequence(run)
        min_s, max_s = settings.min_s / len(sessions), settings.max_s / len(sessions)
        for session in sessions:
            warm_up(session, replace(settings, min_s=min_s, max_s=max_s), clock=clock)


def warm_up(run: Runner, settings: Optional[WarmUp] = None, *, clock: Clock = time.perf_counter) -> WarmedUp:
    """Run until the latency is stable or a limit is reached. Run at least twice, however slow the runs are."""
    settings = settings or WarmUp()
    latencies: List[float] = []
    start = now = clock()
    with quiet_collector():
        while True:
            started = now
            run()
            now = clock()
            latencies.append(now - started)
            spent = now - start
            window = settings.window
            # Medians cost more than a fast run, so compare them once every half window.
            full = len(latencies) >= 2 * window and len(latencies) % max(1, window // 2) == 0
            if full and spent >= settings.min_s and _is_steady(latencies, window, settings.tolerance):
                stable = True
                break
            if len(latencies) >= 2 and (spent >= settings.max_s or len(latencies) >= settings.max_runs):
                window = min(window, len(latencies) // 2)
                stable = len(latencies) >= 4 and _is_steady(latencies, window, settings.tolerance)
                break
    return WarmedUp(len(latencies), spent, stable)


def _is_steady(latencies: List[float], window: int, tolerance: float) -> bool:
    latest = float(np.median(latencies[-window:]))
    previous = float(np.median(latencies[-2 * window : -window]))
    return abs(latest - previous) <= tolerance * previous


@dataclass(frozen=True)
class Bursts:
    """Set the length of a runner's turn in a round.

    Attributes:
        length_s: recorded seconds of a turn (at least one run).
        lead_in_s: seconds of unrecorded runs before the recorded ones. If a run takes longer than `length_s`, there is
            no lead-in.
    """

    length_s: float = 0.1
    lead_in_s: float = 0.02


class Burst(NamedTuple):
    """Describe one turn of a runner.

    Attributes:
        samples: seconds of each run.
        busy_s: seconds of all runs together.
        disturbed: bool[n], True for each disturbed run, from `Waits.find_disturbed`.
        cpu_s: processor time in seconds that another process used for the runs; 0 if this process did them.
    """

    samples: Sequence[float]
    busy_s: float
    disturbed: np.ndarray
    cpu_s: float = 0.0


def run_burst(run: Runner, bursts: Bursts, slow: bool, watch: MachineWatch) -> Burst:
    """Run and return one turn. Skip the lead-in if `slow` is set."""
    # Local names: looking up attributes would be part of the timed runs.
    clock, look = watch.clock, watch.waits.look
    samples, ends = array("d"), array("d")  # an array takes only 8 bytes a query, even in a ten-minute run
    now = clock()
    if not slow and bursts.lead_in_s > 0:
        end = now + bursts.lead_in_s
        while now < end:
            run()
            now = clock()
    watch.start()
    begin = now = clock()
    end = begin + bursts.length_s
    while now < end or not samples:
        started = clock()
        run()
        now = clock()
        samples.append(now - started)
        ends.append(now)
        look(now)
    finished = np.array(ends)
    return Burst(samples, now - begin, watch.waits.find_disturbed(finished - np.array(samples), finished))


UNDISTURBED_ROUNDS = 24
"""On a busy machine, this many rounds without a disturbed runner are enough: four in each of six sessions."""


ESTIMATE_S = 2.0
"""Seconds of timing that suffice for an estimate if a machine is too busy for a claim."""


BUSY = 0.1
"""A machine is busy if others, or a virtual machine's host, used or wanted more than this share of its time, or if
waits for a core took more than this share of the runs' time. No speed is then claimed, even if many runs did not wait:
other work shares the hyperthreads of a core, the cache and the clock, so it slows float and integer kernels unequally,
in all runs alike."""


_FIRST_LOOK = 10
"""Minimum number of rounds before `is_settled` is asked. With fewer than nine, no interval of order statistics has the
confidence of 99.5 % that the first look requires."""


def is_out_of_reach(undisturbed: float, spent_s: float, left_s: float, busy: float = 0.0) -> bool:
    """Return whether a machine is too busy for a claim in the time that is left.

    This is so if `ESTIMATE_S` seconds have passed and, at the present rate, not even half of `UNDISTURBED_ROUNDS` will
    be reached. It is also so if the machine would count as busy even if nobody else used it from now on.

    Args:
        undisturbed: number of undisturbed rounds so far.
        busy: share of the machine's time that others used or wanted so far, 0 to 1.
    """
    few = undisturbed * (spent_s + left_s) < UNDISTURBED_ROUNDS / 2 * spent_s
    return spent_s >= ESTIMATE_S and (few or busy * spent_s > BUSY * (spent_s + left_s))


class Recorder:
    """Record the latencies of one runner, turn by turn."""

    def __init__(self, run: Runners, bursts: Bursts, watch: MachineWatch) -> None:
        local_turns = [partial(run_burst, runner, watch=watch) for runner in _as_sequence(run)]
        # A runner in another process times its bursts there.
        self._turns = [getattr(runner, "burst", turn) for runner, turn in zip(_as_sequence(run), local_turns)]
        self._bursts = bursts
        self._watch = watch
        self._samples = array("d")  # seconds
        self._starts: List[int] = []
        self._disturbed: List[np.ndarray] = []
        self.busy_s = 0.0

    @property
    def count(self) -> int:
        """Return the number of recorded runs."""
        return len(self._samples)

    @property
    def rounds(self) -> int:
        """Return the number of turns taken."""
        return len(self._starts)

    def run_turn(self) -> bool:
        """Run one burst, and return whether at least one of its runs was not disturbed."""
        slow = self.count > 0 and self.busy_s / self.count >= self._bursts.length_s
        self._watch.look_around()
        record = self._turns[self.rounds % len(self._turns)](self._bursts, slow)
        self._starts.append(self.count)
        self._samples.extend(record.samples)
        self._disturbed.append(record.disturbed)
        self._watch.add_outside_time(record.cpu_s)
        self.busy_s += record.busy_s
        return not record.disturbed.size or not record.disturbed.all()

    def build_distribution(self, samples_per_query: int = 1) -> Distribution:
        """Return the latencies recorded so far, in milliseconds. Each turn is a round, and the throughput refers to the
        recorded time.
        """
        disturbed = np.concatenate(self._disturbed) if self._disturbed else np.empty(0, bool)
        return Distribution(
            np.array(self._samples, np.float64) * 1e3,
            np.array(self._starts, np.int64),
            samples_per_query,
            self.busy_s,
            # Disturbances are known either for every run or for none.
            disturbed if len(disturbed) == self.count else np.empty(0, bool),
            self._watch.measure_busy(),
            len(self._turns),
            self._watch.measure_stolen(),
        )


def measure_interleaved(
    runners: Mapping[str, Runners],
    *,
    min_duration_s: float = 2.0,
    min_runs: int = 100,
    patience_s: float = 0.0,
    warmup: Optional[WarmUp] = None,
    seed: int = 0,
    bursts: Optional[Bursts] = None,
    samples_per_query: int = 1,
    clock: Clock = time.perf_counter,
    on_progress: Callable[[float], None] = lambda share: None,
    is_settled: Optional[Settled] = None,
) -> Dict[str, Distribution]:
    """Return latency distributions of several runners, measured in interleaved bursts.

    Args:
        min_duration_s: minimum recorded seconds of every runner.
        min_runs: minimum recorded runs of every runner. Both minimums must be reached.
        patience_s: maximum additional seconds on a busy machine, to reach `UNDISTURBED_ROUNDS` over all sessions. The
            measurement ends earlier if it cannot reach that number.
        warmup: settings of the warm-up; None if the caller has warmed up the runners.
        seed: seed for the order of the runners in each round.
        bursts: length of the turns; default `Bursts()`, shortened for a short `min_duration_s` so that there are at
            least 20 rounds.
        on_progress: function that is called between rounds with the finished share of the work, 0 to 1.
        is_settled: rule that may end the measurement before the minimum duration. It is asked at intervals, first after
            two rounds in each session, and `_FIRST_LOOK` rounds; the number of rounds grows by a quarter between looks.

    Returns:
        A distribution for each runner, in the order of `runners`, all with the same number of rounds.
    """
    check_limits(min_duration_s, min_runs)
    if not runners:
        raise ValueError("nothing to measure: no runners")
    # The user waits for the warm-up, too, so it counts as time in which a busy machine does not allow a claim.
    start = clock()
    warm_up_all(runners.values(), warmup, clock)
    if bursts is None:
        length = min(Bursts.length_s, min_duration_s / 20)
        bursts = Bursts(length, min(Bursts.lead_in_s, length / 5))
    with MachineWatch(clock) as watch:
        recorders = {name: Recorder(run, bursts, watch) for name, run in runners.items()}
        order = list(recorders.values())
        shuffle = random.Random(seed).shuffle
        given_up: Optional[float] = None
        # number of undisturbed rounds in each session
        together = [0] * max(len(_as_sequence(run)) for run in runners.values())
        # A session whose median comes from a single round would make the sessions look more different than they are.
        looks, next_look = 0, max(_FIRST_LOOK, 2 * len(together))
        while True:
            shuffle(order)
            session = order[0].rounds % len(together)
            with quiet_collector():
                turns = [recorder.run_turn() for recorder in order]
            # A claim rests on rounds in which every runner was undisturbed.
            together[session] += all(turns)
            share = min(min(_compute_share(r.busy_s, min_duration_s), _compute_share(r.count, min_runs)) for r in order)
            on_progress(share)
            rounds = order[0].rounds
            if is_settled is not None and rounds >= next_look:
                looks, next_look = looks + 1, rounds + max(len(together), rounds // 4)
                measured = {name: r.build_distribution(samples_per_query) for name, r in recorders.items()}
                if is_settled(measured, looks):
                    return measured
            if share < 1:
                continue
            # Patience begins when both minimums are reached.
            given_up = clock() + patience_s if given_up is None else given_up
            rounds_needed = min(rounds, UNDISTURBED_ROUNDS) // len(together)
            now = clock()
            hopeless = is_out_of_reach(sum(together), now - start, given_up - now, watch.measure_busy())
            if now >= given_up or hopeless or min(together) >= rounds_needed:
                return {name: r.build_distribution(samples_per_query) for name, r in recorders.items()}


def check_limits(min_duration_s: float, min_queries: int) -> None:
    """Refuse limits that would never be reached, or would be reached at once."""
    if not 0 <= min_duration_s < float("inf"):
        raise ValueError(f"the minimum duration must be a number of seconds, not {min_duration_s}")
    if min_queries < 1:
        raise ValueError(f"the minimum number of queries must be at least 1, not {min_queries}")


def _compute_share(value: float, goal: float) -> float:
    return min(1.0, value / goal) if goal > 0 else 1.0


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Turn Python's garbage collector off while the block is timed, because its pauses are not part of the model's
    time.

    Use this for one burst or round at a time, so that the collector can run in between.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
