"""Define the four scenarios of MLPerf Inference: what a query is, when it is issued, and which metric is the main one.

    single-stream   one sample a query, the next as soon as the last is done             p90 of the latency
    multi-stream    eight samples a query, the next as soon as the last is done          p99 of the latency
    server          one sample a query, arriving by a Poisson process of a given rate    rate at which p99 <= bound
    offline         everything at once, in batches                                       samples a second

Each scenario runs for a minimum duration and a minimum number of queries; both must be reached. Samples are drawn from
a fixed set, in an order that the seed determines. There is one worker, because the runtime already works in parallel
inside the operators. So in the server scenario, a query that arrives while another runs waits its turn, and its latency
counts from its arrival.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Callable, Dict, List, Mapping, Sequence

import numpy as np

from edgeq_device.measure.latency import Clock, Distribution, Runner, check_limits, quiet_collector

Feed = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Scenario:
    """Describe a scenario: its name, its main metric (a key of its report), and the number of samples in one query."""

    name: str
    metric: str
    samples_per_query: int


SINGLE_STREAM = Scenario("single-stream", "p90_ms", 1)
MULTI_STREAM = Scenario("multi-stream", "p99_ms", 8)
SERVER = Scenario("server", "achieved_qps", 1)
OFFLINE = Scenario("offline", "samples_per_s", 1)
SCENARIOS = {s.name: s for s in (SINGLE_STREAM, MULTI_STREAM, SERVER, OFFLINE)}

_CYCLE = 1024  # number of queries after which the drawn order repeats
# Settings of the search for the highest rate: seconds of a trial, number of trials, and the ratio below which two rates
# are close enough.
_PROBE_S, _TRIALS, _WITHIN = 2.0, 8, 1.1


def draw_order(samples: int, draws: int, seed: int) -> List[int]:
    """Return `draws` indices of samples, each below `samples`. The result consists of complete shuffles one after
    another, so all indices occur equally often.
    """
    if samples == 1:
        return [0] * draws
    random = np.random.default_rng(seed)
    shuffles = [random.permutation(samples) for _ in range(-(-draws // samples))]
    return [int(i) for i in np.concatenate(shuffles)[:draws]]


def make_runner(
    session: Any, feeds: Sequence[Feed], *, samples_per_query: int = 1, batch: int = 1, seed: int = 0
) -> Runner:
    """Return a function that runs the next query on `session`. The session is an `onnxruntime.InferenceSession`, or any
    object with the same method `run`.

    Args:
        feeds: the fixed set of samples, each in the form that `session.run` takes.
        samples_per_query: number of samples in one query.
        batch: number of samples that are stacked along axis 0 into one `run`. A query takes ceil(samples / batch) runs.
        seed: seed of the sample order. The same seed gives every session the same queries.
    """
    if not feeds:
        raise ValueError("no samples to run")
    # A session in another process calls this function in that process.
    elsewhere = getattr(session, "query_runner", None)
    if elsewhere is not None:
        runner: Runner = elsewhere(feeds, samples_per_query=samples_per_query, batch=batch, seed=seed)
        return runner
    order = cycle(draw_order(len(feeds), max(_CYCLE, len(feeds)) // samples_per_query * samples_per_query, seed))
    run = session.run
    if samples_per_query == 1:
        single = cycle([dict(feeds[next(order)]) for _ in range(max(_CYCLE, len(feeds)))])
        return lambda: run(None, next(single))
    # Stack the samples before anything is timed, because stacking is not the model's work. Fewer stacked queries are
    # kept if they are large.
    one_query = sum(int(np.asarray(v).nbytes) for v in feeds[0].values()) * samples_per_query
    ready = max(1, min(64, (64 << 20) // max(1, one_query)))
    queries = cycle([_stack([feeds[next(order)] for _ in range(samples_per_query)], batch) for _ in range(ready)])

    def run_all() -> None:
        """Run one query: its samples, batch after batch."""
        for feed in next(queries):
            run(None, feed)

    return run_all


def _stack(feeds: List[Feed], batch: int) -> List[Dict[str, np.ndarray]]:
    groups = [feeds[i : i + batch] for i in range(0, len(feeds), batch)]
    if batch == 1:
        return [dict(g[0]) for g in groups]
    return [{name: np.concatenate([f[name] for f in group]) for name in group[0]} for group in groups]


@dataclass(frozen=True, eq=False)
class ServerResult:
    """Hold one run of the server scenario.

    Attributes:
        latency: latencies from a query's arrival to its completion.
        target_qps: requested mean arrival rate.
        achieved_qps: completed queries divided by the time from the start to the last completion.
        latency_bound_ms: the bound on p99.
        over_bound_share: share of the queries over the bound, 0 to 1.
        complete: False if the run was stopped early because it could no longer meet the bound.
    """

    latency: Distribution
    target_qps: float
    achieved_qps: float
    latency_bound_ms: float
    over_bound_share: float
    complete: bool

    @property
    def valid(self) -> bool:
        """Return whether the machine sustained the rate: p99 is within the bound."""
        return self.complete and self.latency.p99 <= self.latency_bound_ms


def draw_arrivals(rate_qps: float, min_duration_s: float, min_queries: int, seed: int) -> np.ndarray:
    """Return float64[n]: ascending arrival times of a Poisson process, in seconds.

    The gaps are exponential with mean 1 / rate. They continue until both limits are met, so n >= `min_queries` and the
    last arrival is at `min_duration_s` or later.
    """
    if not 0 < rate_qps < float("inf"):
        raise ValueError(f"the arrival rate must be a positive number of queries a second, not {rate_qps}")
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate_qps, min_queries))
    while times[-1] < min_duration_s:
        more = random.exponential(1 / rate_qps, max(16, min(1 << 20, int(rate_qps * min_duration_s))))
        times = np.concatenate([times, times[-1] + np.cumsum(more)])
    count = max(min_queries, int(np.searchsorted(times, min_duration_s)) + 1)
    return times[:count]


def run_server(
    run: Runner,
    *,
    rate_qps: float,
    latency_bound_ms: float,
    min_duration_s: float = 2.0,
    min_queries: int = 100,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    on_progress: Callable[[float], None] = lambda share: None,
) -> ServerResult:
    """Run the server scenario at one rate.

    The run stops early when so many queries are over the bound that p99 must be over it too. Without this rule, an
    overloaded server would take many times the duration for the same result.
    """
    check_limits(min_duration_s, min_queries)
    due = draw_arrivals(rate_qps, min_duration_s, min_queries, seed)
    fatal = len(due) - int(0.99 * len(due) + 1e-9)  # with this many queries over the bound, p99 is over it too
    latencies = np.empty(len(due))
    over = 0
    completed = 0
    reported = time_zero = clock()
    finished = time_zero
    with quiet_collector():
        for arrival in due + time_zero:
            # A sleep is precise only to half a millisecond, so the loop watches the clock for the rest.
            while (remaining := float(arrival) - clock()) > 0:
                sleep(remaining - 5e-4 if remaining > 1e-3 else 0.0)
            run()
            finished = clock()
            latencies[completed] = finished - arrival
            over += latencies[completed] * 1e3 > latency_bound_ms
            completed += 1
            if over >= fatal:
                break
            if finished - reported > 0.2:
                on_progress(completed / len(due))
                reported = finished
    on_progress(1.0)
    elapsed = finished - time_zero
    latency = Distribution(latencies[:completed] * 1e3, elapsed_s=elapsed)
    achieved = completed / elapsed if elapsed > 0 else 0.0
    return ServerResult(latency, rate_qps, achieved, latency_bound_ms, over / completed, completed == len(due))


def estimate_max_rate(service_s: np.ndarray, latency_bound_ms: float, seed: int = 0, queries: int = 20_000) -> float:
    """Return the highest Poisson rate, in queries a second, at which one worker with these service times keeps p99
    within the bound. Return 0 if no rate does.

    The rate comes from a simulation, and the search on the machine starts from it. With service times S and arrivals A,
    completions follow Lindley's recursion C[i] = max(A[i], C[i-1]) + S[i]. It unrolls to C[i] = T[i] + max over j <= i
    of (A[j] - T[j-1]), where T is the running sum of S. One set of exponential gaps is scaled to each rate, so p99
    rises with the rate, and bisection finds the highest rate.
    """
    random = np.random.default_rng(seed)
    service = random.choice(np.asarray(service_s, np.float64), queries)
    gaps = np.cumsum(random.exponential(1.0, queries))
    total = np.cumsum(service)
    waited_from = total - service

    def p99_ms(rate: float) -> float:
        """Return the 99th percentile of the simulated latencies at `rate` queries a second, in milliseconds."""
        arrival = gaps / rate
        completion = total + np.maximum.accumulate(arrival - waited_from)
        return float(np.sort(completion - arrival)[int(0.99 * queries)]) * 1e3

    low, high = 0.0, 1 / float(service.mean())
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if p99_ms(middle) <= latency_bound_ms else (low, middle)
    return low if low > 1e-6 * high else 0.0


def find_max_rate(
    serve_at: Callable[[float, float], ServerResult],
    service_s: np.ndarray,
    latency_bound_ms: float,
    *,
    full_s: float,
    seed: int = 0,
) -> ServerResult:
    """Return a run at the highest rate that the machine sustains. The rate is found to within 10 %.

    The search starts from the simulated rate. Each step halves, on a logarithmic scale, the gap between the highest
    rate that the machine sustained and the lowest that it did not. Each rate is tried for a few seconds. At the end,
    the rate that was found runs for the full duration.

    Args:
        serve_at: function that takes a rate (queries a second) and a minimum duration (seconds) and returns a run of
            the scenario.
        service_s: service times in seconds of queries that do not wait.
        full_s: minimum duration of the final run, in seconds.

    Returns:
        A valid run, or, if the machine sustained no rate, the last run, which is not valid.
    """
    high = 1 / float(np.median(service_s))
    low = 0.0
    rate = min(max(estimate_max_rate(service_s, latency_bound_ms, seed), 0.1 * high), 0.95 * high)
    best = None
    for _ in range(_TRIALS):
        result = serve_at(rate, min(_PROBE_S, full_s))
        if result.valid:
            best, low = result, rate
        else:
            high = rate
        if low and high / low <= _WITHIN:
            break
        rate = math.sqrt(low * high) if low else rate / 2
    if best is None or full_s <= _PROBE_S:
        return best or result
    result = serve_at(low, full_s)
    for _ in range(3):
        if result.valid:
            break
        low *= 0.9
        result = serve_at(low, full_s)
    return result
