from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.latency import Distribution
from edgeq_device.measure.scenarios import (
    SCENARIOS,
    ServerResult,
    draw_arrivals,
    draw_order,
    estimate_max_rate,
    find_max_rate,
    make_runner,
    run_server,
)


class Recording:
    """Record the inputs of a session."""

    def __init__(self) -> None:
        self.fed: list[dict[str, np.ndarray]] = []

    def run(self, names: object, feed: dict[str, np.ndarray]) -> None:
        assert names is None
        self.fed.append(feed)


def samples(n: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((1, 2), i, np.float32)} for i in range(n)]


def test_the_scenarios_and_the_figure_that_counts() -> None:
    assert {n: (s.metric, s.samples_per_query) for n, s in SCENARIOS.items()} == {
        "single-stream": ("p90_ms", 1),
        "multi-stream": ("p99_ms", 8),
        "server": ("achieved_qps", 1),
        "offline": ("samples_per_s", 1),
    }


def test_sample_order_takes_all_equally_often_and_follows_the_seed() -> None:
    order = draw_order(7, 70, seed=3)
    assert set(Counter(order).values()) == {10}
    assert order == draw_order(7, 70, seed=3) != draw_order(7, 70, seed=4)
    assert sorted(draw_order(7, 3, seed=3)) != [0, 1, 2] or len(set(draw_order(7, 3, seed=3))) == 3


def test_single_queries_are_the_same_for_every_session() -> None:
    a, b = Recording(), Recording()
    for session in (a, b):
        run = make_runner(session, samples(5), seed=1)
        for _ in range(20):
            run()
    drawn = [float(f["x"][0, 0]) for f in a.fed]
    assert drawn == [float(f["x"][0, 0]) for f in b.fed]
    assert set(Counter(drawn).values()) == {4}


@pytest.mark.parametrize(("batch", "shapes"), [(1, [(1, 2)] * 8), (8, [(8, 2)]), (3, [(3, 2), (3, 2), (2, 2)])])
def test_a_multi_stream_query_runs_eight_samples(batch: int, shapes: list[tuple[int, int]]) -> None:
    session = Recording()
    make_runner(session, samples(5), samples_per_query=8, batch=batch)()
    assert [f["x"].shape for f in session.fed] == shapes


def test_more_samples_than_the_cycle_are_all_run() -> None:
    session = Recording()
    run = make_runner(session, samples(1500))
    for _ in range(1500):
        run()
    assert len({float(f["x"][0, 0]) for f in session.fed}) == 1500


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        make_runner(Recording(), [])


def test_arrivals_are_a_poisson_process() -> None:
    times = draw_arrivals(200.0, 100.0, 100, seed=0)
    gaps = np.diff(times)
    assert np.all(gaps >= 0)
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    # an exponential distribution has a standard deviation equal to its mean
    assert gaps.std() == pytest.approx(1 / 200, rel=0.05)
    assert np.array_equal(times, draw_arrivals(200.0, 100.0, 100, seed=0))
    assert not np.array_equal(times[:100], draw_arrivals(200.0, 100.0, 100, seed=1)[:100])


@pytest.mark.parametrize(("rate", "duration", "queries"), [(10.0, 5.0, 1), (10.0, 0.0, 500), (0.5, 3.0, 1)])
def test_arrivals_meet_both_minima(rate: float, duration: float, queries: int) -> None:
    times = draw_arrivals(rate, duration, queries, seed=2)
    assert len(times) >= queries
    assert times[-1] >= duration
    if len(times) > queries:
        assert times[-2] < duration


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_makes_no_sense_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        draw_arrivals(rate, 1.0, 1, seed=0)


def brute_force(due: np.ndarray, service_s: float) -> list[float]:
    free, latencies = 0.0, []
    for arrival in due:
        free = max(free, arrival) + service_s
        latencies.append(free - arrival)
    return latencies


def test_latency_counts_from_the_arrival_and_so_includes_the_wait(clock: Any) -> None:
    result = run_server(
        clock.runner([0.01]),
        rate_qps=60.0,
        latency_bound_ms=1e6,
        min_duration_s=5.0,
        min_queries=100,
        seed=4,
        clock=clock,
        sleep=clock.sleep,
    )
    expected = brute_force(draw_arrivals(60.0, 5.0, 100, seed=4), 0.01)
    assert result.complete
    assert result.valid
    assert result.latency.samples_ms == pytest.approx(np.array(expected) * 1e3, abs=0.1)
    assert result.latency.to_dict()["max_ms"] > 20
    assert result.achieved_qps == pytest.approx(60.0, rel=0.15)
    assert result.over_bound_share == 0.0


def test_over_bound_share_and_verdict(clock: Any) -> None:
    # The queries are far apart, so none waits, and two of a hundred are slow.
    run = clock.runner([0.001] * 49 + [0.1])
    result = run_server(
        run, rate_qps=1.0, latency_bound_ms=50, min_duration_s=0, min_queries=100, clock=clock, sleep=clock.sleep
    )
    assert not result.valid
    fine = clock.runner([0.001] * 199 + [0.1])
    result = run_server(
        fine, rate_qps=0.5, latency_bound_ms=50, min_duration_s=0, min_queries=1000, clock=clock, sleep=clock.sleep
    )
    assert result.valid
    assert result.over_bound_share == pytest.approx(0.005)


def test_an_overloaded_server_is_broken_off(clock: Any) -> None:
    start = clock.now
    result = run_server(
        clock.runner([0.1]),
        rate_qps=1000.0,
        latency_bound_ms=200,
        min_duration_s=100.0,
        clock=clock,
        sleep=clock.sleep,
    )
    assert not result.valid
    assert not result.complete
    assert clock.now - start < 200  # all queries would take ten thousand seconds
    assert result.latency.count < 2000


def test_breaking_off_never_changes_the_verdict(clock: Any) -> None:
    """When the scenario breaks off, p99 over all queries would exceed the bound even if all remaining queries were
    fast.
    """
    run = clock.runner([0.001] * 98 + [0.1] * 2)
    result = run_server(
        run, rate_qps=1.0, latency_bound_ms=50, min_duration_s=0, min_queries=100, clock=clock, sleep=clock.sleep
    )
    assert result.latency.count == 99
    whole = Distribution(np.concatenate([result.latency.samples_ms, [0.0]]))
    assert whole.p99 > 50


def test_progress_reaches_one(clock: Any) -> None:
    seen: list[float] = []
    run_server(
        clock.runner([0.001]),
        rate_qps=50,
        latency_bound_ms=100,
        clock=clock,
        sleep=clock.sleep,
        on_progress=seen.append,
    )
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_estimated_rate_agrees_with_queueing_theory() -> None:
    """With exponential service (M/M/1), the time in the system is exponential with rate mu - lambda, so p99 = ln(100) /
    (mu - lambda).
    """
    service = np.random.default_rng(0).exponential(0.01, 50_000)
    bound_s = 0.1
    expected = 1 / service.mean() - np.log(100) / bound_s
    found = estimate_max_rate(service, bound_s * 1e3, seed=1, queries=200_000)
    assert found == pytest.approx(expected, rel=0.06)


def test_no_rate_holds_a_bound_below_the_service_time() -> None:
    assert estimate_max_rate(np.full(100, 0.01), 5.0) == 0.0


def test_the_search_finds_the_highest_rate_that_holds(clock: Any) -> None:
    tried: list[float] = []

    def serve_at(rate: float, seconds: float) -> ServerResult:
        tried.append(seconds)
        latency = 5.0 if rate <= 40 else 500.0
        return ServerResult(Distribution(np.full(200, latency)), rate, rate, 100.0, 0.0, True)

    found = find_max_rate(serve_at, np.full(10, 0.01), 100.0, full_s=30.0)
    assert found.valid
    assert 36 <= found.target_qps <= 40
    assert tried[-1] == 30.0
    assert set(tried[:-1]) == {2.0}
    assert len(tried) <= 9


def test_a_rate_that_fails_in_full_is_lowered(clock: Any) -> None:
    def serve_at(rate: float, seconds: float) -> ServerResult:
        fine = rate <= (50 if seconds < 10 else 42)
        return ServerResult(Distribution(np.full(200, 5.0 if fine else 500.0)), rate, rate, 100.0, 0.0, True)

    found = find_max_rate(serve_at, np.full(10, 0.01), 100.0, full_s=30.0)
    assert found.valid
    assert found.target_qps <= 42


def test_a_search_without_success_ends_with_what_it_tried_last() -> None:
    def serve_at(rate: float, seconds: float) -> ServerResult:
        return ServerResult(Distribution(np.full(200, 500.0)), rate, rate, 100.0, 1.0, True)

    assert not find_max_rate(serve_at, np.full(10, 0.01), 100.0, full_s=1.0).valid


def test_on_the_real_clock_queries_are_not_early() -> None:
    result = run_server(lambda: None, rate_qps=200, latency_bound_ms=1e6, min_duration_s=0.05, min_queries=5)
    assert result.latency.minimum >= 0
    assert result.latency.count >= 5
