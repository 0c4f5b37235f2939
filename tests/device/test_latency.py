from __future__ import annotations

import gc
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.latency import Bursts, WarmUp, measure_interleaved, quiet_collector, warm_up

WARM = WarmUp(window=4, tolerance=0.05, min_s=0.0, max_s=10.0)


def test_warm_up_ends_when_two_windows_agree(clock: Any) -> None:
    cooling = [0.05 * 0.7**i for i in range(12)] + [0.0005] * 1000
    warmed = warm_up(clock.runner(cooling), WARM, clock=clock)
    assert warmed.stable
    assert 20 <= warmed.runs <= 24


def test_warm_up_takes_its_minimum_time_even_if_stable_at_once(clock: Any) -> None:
    warmed = warm_up(clock.runner([0.01]), WarmUp(window=4, min_s=0.5, max_s=5.0), clock=clock)
    assert warmed.stable
    assert warmed.seconds >= 0.5


def test_warm_up_that_never_settles_ends_at_its_limit_and_says_so(clock: Any) -> None:
    rising = [0.001 * 1.1**i for i in range(400)]
    warmed = warm_up(clock.runner(rising), WarmUp(window=4, max_s=1.0), clock=clock)
    assert not warmed.stable
    assert warmed.seconds == pytest.approx(1.0, abs=0.2)


def test_a_model_too_slow_for_the_windows_is_judged_by_what_there_is(clock: Any) -> None:
    warmed = warm_up(clock.runner([2.0]), WarmUp(window=10, max_s=7.0), clock=clock)
    assert (warmed.runs, warmed.stable) == (4, True)
    assert warm_up(clock.runner([60.0]), WarmUp(max_s=5.0), clock=clock).runs == 2


def test_warm_up_is_bounded_in_runs(clock: Any) -> None:
    assert warm_up(clock.runner([0.0, 1e-9]), WarmUp(min_s=1.0, max_runs=50), clock=clock).runs == 50


def test_both_minima_are_met_by_every_runner(clock: Any) -> None:
    runners = {"slow": clock.runner([0.05]), "fast": clock.runner([0.001])}
    measured = measure_interleaved(runners, min_duration_s=1.0, min_runs=40, clock=clock)
    assert list(measured) == ["slow", "fast"]
    assert measured["slow"].count >= 40
    for name, d in measured.items():
        assert d.elapsed_s >= 1.0, name
        assert d.count >= 40
    assert measured["slow"].p50 == pytest.approx(50.0)
    assert measured["fast"].p50 == pytest.approx(1.0)
    assert len(measured["slow"].rounds) == len(measured["fast"].rounds) >= 20


def test_minimum_runs_prolong_a_short_duration(clock: Any) -> None:
    measured = measure_interleaved({"a": clock.runner([0.5])}, min_duration_s=0.1, min_runs=7, clock=clock)
    assert measured["a"].count == 7


def test_one_run_is_enough_where_no_more_is_requested(clock: Any) -> None:
    measured = measure_interleaved({"a": clock.runner([0.5])}, min_duration_s=0.0, min_runs=1, clock=clock)
    assert measured["a"].count == 1


def test_order_within_rounds_is_shuffled_by_the_seed(clock: Any) -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        runners = {n: clock.runner([1.0], log, n) for n in "abc"}
        measure_interleaved(runners, min_duration_s=0.0, min_runs=30, seed=seed, bursts=Bursts(0.5, 0), clock=clock)
        return log

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    rounds = ["".join(first[i : i + 3]) for i in range(0, 90, 3)]
    assert {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert len(set(rounds)) > 3


def test_bursts_are_back_to_back_with_an_unrecorded_lead_in(clock: Any) -> None:
    log: list[str] = []
    runners = {n: clock.runner([0.01], log, n) for n in "ab"}
    bursts = Bursts(length_s=0.0999, lead_in_s=0.0199)
    measured = measure_interleaved(runners, min_duration_s=0.5, min_runs=1, bursts=bursts, clock=clock)
    lengths = [len(list(group)) for _, group in groupby(log)]
    assert set(lengths) <= {12, 24}
    recorded = sum(d.count for d in measured.values())
    assert len(log) * 10 == recorded * 12


def test_a_runner_slower_than_a_burst_gets_no_lead_in_and_one_run_a_round(clock: Any) -> None:
    log: list[str] = []
    measured = measure_interleaved(
        {"a": clock.runner([1.0], log, "a")}, min_duration_s=0, min_runs=10, bursts=Bursts(0.1, 0.02), clock=clock
    )
    assert measured["a"].rounds.tolist() == list(range(10))
    assert len(log) == 11  # one more run: the first round does not know yet how slow the runner is


def test_the_lead_in_is_not_in_the_distribution(clock: Any) -> None:
    # Every burst starts with one slow run, as it does after another model's burst.
    def run(count: list[int] = [0]) -> None:  # noqa: B006
        clock.now += 0.005 if count[0] % 12 == 0 else 0.001
        count[0] += 1

    measured = measure_interleaved(
        {"a": run}, min_duration_s=0.1, min_runs=1, bursts=Bursts(0.0099, 0.0055), clock=clock
    )
    assert measured["a"].to_dict()["max_ms"] == pytest.approx(1.0)


def test_progress_rises_to_one(clock: Any) -> None:
    seen: list[float] = []
    measure_interleaved({"a": clock.runner([0.01])}, min_duration_s=1.0, clock=clock, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) >= 20


@pytest.mark.parametrize(("duration", "runs"), [(-1.0, 1), (float("nan"), 1), (float("inf"), 1), (1.0, 0)])
def test_limits_that_make_no_sense_are_refused(duration: float, runs: int) -> None:
    with pytest.raises(ValueError, match="minimum"):
        measure_interleaved({"a": lambda: None}, min_duration_s=duration, min_runs=runs)


def test_no_runners_are_refused() -> None:
    with pytest.raises(ValueError, match="no runners"):
        measure_interleaved({})


def test_a_runners_error_comes_through_and_the_collector_is_back_on(clock: Any) -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        measure_interleaved({"a": broken}, clock=clock)
    assert gc.isenabled()


def test_the_collector_is_off_inside_and_as_it_was_after() -> None:
    with quiet_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with quiet_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_with_the_real_clock_latencies_are_positive() -> None:
    measured = measure_interleaved(
        {"sum": lambda: np.arange(1000).sum()}, min_duration_s=0.01, min_runs=10, warmup=WarmUp(min_s=0, max_s=0.01)
    )
    assert measured["sum"].count >= 10
    assert measured["sum"].minimum > 0
