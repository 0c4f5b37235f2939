from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.claim import SettlingRules, compute_ratio, rank_until_settled
from edgeq_device.measure.latency import Burst, Bursts, Distribution

ONE = Bursts(length_s=0.0, lead_in_s=0.0)


def noisy(seed: int, typical: float, spread: float) -> np.ndarray:
    return typical * np.random.default_rng(seed).lognormal(0, spread, 2000)


def test_ratio_says_how_many_times_faster_the_second_is() -> None:
    r = compute_ratio(Distribution(np.full(50, 4.0)), Distribution(np.full(50, 2.0)))
    assert (r.estimate, r.low, r.high, r.pairs) == (2.0, 2.0, 2.0, 50)
    assert r.confidence >= 0.95


def test_interval_ends_are_the_order_statistics() -> None:
    r = compute_ratio(Distribution(np.arange(1.0, 11.0)), Distribution(np.ones(10)))
    # P(Binomial(10, 1/2) <= 1) = 11/1024, <= 2: 56/1024. So one value is left out at either end.
    assert (r.low, r.high) == (2.0, 9.0)
    assert r.confidence == pytest.approx(1 - 2 * (comb(10, 0) + comb(10, 1)) / 1024)


@pytest.mark.parametrize(("n", "covered"), [(1, 0.0), (2, 0.5), (5, 0.9375)])
def test_too_few_rounds_give_the_whole_range_and_say_what_it_covers(n: int, covered: float) -> None:
    r = compute_ratio(Distribution(np.arange(1.0, n + 1)), Distribution(np.ones(n)))
    assert (r.low, r.high, r.confidence) == (1.0, float(n), covered)


def test_pairing_cancels_drift_that_hits_both() -> None:
    drift = np.linspace(1, 3, 100)
    r = compute_ratio(Distribution(2.1 * drift), Distribution(drift))
    assert (r.low, r.high) == (pytest.approx(2.1), pytest.approx(2.1))


def test_rounds_beyond_the_shorter_measurement_are_left_out() -> None:
    r = compute_ratio(Distribution(np.full(10, 3.0)), Distribution(np.repeat([1.0, 9.0], [10, 20])))
    assert (r.estimate, r.pairs) == (3.0, 10)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(300):
        a, b = noisy(seed, 2.0, 0.3)[:40], noisy(10_000 + seed, 1.0, 0.3)[:40]
        r = compute_ratio(Distribution(a), Distribution(b))
        hits += r.low <= 2.0 <= r.high
    assert hits >= 0.92 * 300


def test_ratio_of_many_rounds_is_finite_and_narrow() -> None:
    r = compute_ratio(Distribution(np.tile(noisy(1, 2.0, 0.1), 4)), Distribution(np.tile(noisy(2, 1.0, 0.1), 4)))
    assert 1.98 < r.low < r.estimate < r.high < 2.02


def test_clear_differences_settle_soon(clock: Any) -> None:
    runners = {
        "slow": clock.runner(noisy(1, 0.030, 0.05)),
        "fast": clock.runner(noisy(2, 0.010, 0.05)),
        "middle": clock.runner(noisy(3, 0.020, 0.05)),
    }
    ranking = rank_until_settled(runners, bursts=ONE, clock=clock)
    assert ranking.order == ("fast", "middle", "slow")
    assert ranking.settled
    assert ranking.ties == ()
    assert ranking.rounds <= 15


def test_a_small_difference_in_noise_takes_longer_but_settles(clock: Any) -> None:
    runners = {"a": clock.runner(noisy(1, 0.0105, 0.1)), "b": clock.runner(noisy(2, 0.010, 0.1))}
    ranking = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(max_rounds=2000))
    assert (ranking.order, ranking.settled) == (("b", "a"), True)
    assert ranking.rounds > 20


def test_equally_fast_runners_settle_as_a_tie(clock: Any) -> None:
    runners = {"a": clock.runner(noisy(1, 0.01, 0.01)), "b": clock.runner(noisy(2, 0.01, 0.01))}
    ranking = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.01))
    assert ranking.settled
    assert {frozenset(t) for t in ranking.ties} == {frozenset("ab")}


def test_a_winner_within_the_tolerance_is_enough(clock: Any) -> None:
    """The order is settled once the first is slower by at most the tolerance. It would take long to prove or exclude a
    difference of about the tolerance.
    """
    runners = {"a": clock.runner(noisy(1, 0.0101, 0.05)), "b": clock.runner(noisy(2, 0.0100, 0.05))}
    ranking = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.01, max_rounds=2000))
    assert (ranking.order, ranking.settled) == (("b", "a"), True)
    assert ranking.rounds <= 600


def test_an_order_within_the_tolerance_costs_no_more_than_it(clock: Any) -> None:
    """In at most 5 % of the races with a tolerance of 1 %, a runner that is 2 % slower is settled as the first."""
    wrong = 0
    for seed in range(100):
        runners = {"a": clock.runner(noisy(seed, 0.0102, 0.1)), "b": clock.runner(noisy(1000 + seed, 0.01, 0.1))}
        ranking = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.01, max_rounds=400))
        wrong += ranking.settled and ranking.order[0] == "a"
    assert wrong <= 5


def test_after_enough_rounds_the_estimate_makes_a_tie(clock: Any) -> None:
    """After `enough` rounds, an estimate within 3 % makes a tie, although the rounds scatter too much to bound the
    ratio so closely. The ratio to `keep` must still be bounded.
    """
    runners = {"a": clock.runner(noisy(2, 0.01, 0.1)), "b": clock.runner(noisy(3, 0.01, 0.1))}
    rules, how = SettlingRules(top=1, tie=0.03, min_rounds=12), {"bursts": ONE, "clock": clock}
    ranking = rank_until_settled(runners, replace(rules, enough=24), **how)
    assert ranking.settled
    assert 24 <= ranking.rounds <= 40
    assert {frozenset(tie) for tie in ranking.ties} == {frozenset("ab")}
    assert rank_until_settled(runners, rules, **how).rounds > 60
    assert rank_until_settled(runners, replace(rules, enough=24, keep="a"), **how).rounds > 60


def test_a_far_slower_runner_is_dropped_in_few_rounds(clock: Any) -> None:
    """A runner that is far slower in all of six rounds is dropped, although six are too few for the certainty that 36
    pairs of runners demand.
    """
    log: list[str] = []
    near = {f"near {n}": clock.runner(noisy(n, 0.01, 0.05), log, f"near {n}") for n in range(8)}
    runners = {**near, "far": clock.runner(noisy(9, 0.02, 0.05), log, "far")}
    rank_until_settled(runners, rules=SettlingRules(top=1, tie=0.0, max_rounds=30), bursts=ONE, clock=clock)
    assert log.count("far") == 6
    assert log.count("near 0") == 30


def test_equal_runners_in_noise_are_seldom_ordered(clock: Any) -> None:
    """Repeated looks find a difference that does not exist in at most 5 % of the races."""
    wrong = 0
    for seed in range(100):
        runners = {"a": clock.runner(noisy(seed, 0.01, 0.2)), "b": clock.runner(noisy(1000 + seed, 0.01, 0.2))}
        ranking = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.0, max_rounds=100))
        wrong += ranking.settled
    assert wrong <= 5


def test_giving_up_is_reported(clock: Any) -> None:
    runners = {"a": clock.runner(noisy(1, 0.01, 0.5)), "b": clock.runner(noisy(2, 0.01, 0.5))}
    by_rounds = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.0, max_rounds=9))
    assert (by_rounds.settled, by_rounds.rounds) == (False, 9)
    by_time = rank_until_settled(runners, bursts=ONE, clock=clock, rules=SettlingRules(tie=0.0, max_duration_s=0.3))
    assert not by_time.settled
    assert by_time.rounds < 60


def test_the_clearly_slower_are_dropped_when_only_the_top_counts(clock: Any) -> None:
    log: list[str] = []
    runners = {
        "best": clock.runner(noisy(1, 0.0100, 0.05), log, "best"),
        "near": clock.runner(noisy(2, 0.0102, 0.05), log, "near"),
        "far": clock.runner(noisy(3, 0.0500, 0.05), log, "far"),
    }
    ranking = rank_until_settled(
        runners, rules=SettlingRules(top=1, tie=0.001, max_rounds=1000), bursts=ONE, clock=clock
    )
    assert ranking.settled
    assert ranking.order == ("best", "near", "far")
    assert log.count("far") < log.count("near") == log.count("best") == ranking.rounds


class Disturbed:
    """Imitate a session whose first `turns` turns are disturbed."""

    def __init__(self, turns: int, seconds: float) -> None:
        self._left, self._seconds = turns, seconds

    def __call__(self) -> None:
        """Do nothing, because warm-up and lead-in are not timed here."""

    def burst(self, bursts: Bursts, slow: bool) -> Burst:
        """Make one run."""
        self._left -= 1
        return Burst([self._seconds], self._seconds, np.array([self._left >= 0]))


@pytest.mark.parametrize(("keep", "rounds"), [("float", 30), ("", 12)])
def test_a_settled_order_waits_for_an_undisturbed_run_in_each_session(keep: str, rounds: int) -> None:
    runners = {
        "float": [Disturbed(0, 0.02) for _ in range(6)],
        "int8": [Disturbed(4 if session == 5 else 0, 0.01) for session in range(6)],
    }
    ranking = rank_until_settled(runners, rules=SettlingRules(keep=keep, min_rounds=12), bursts=ONE)
    assert ranking.settled
    # The sixth session's fifth turn is round 30.
    assert rounds <= ranking.rounds < rounds + rounds / 4
    counted = compute_ratio(ranking.distributions["float"], ranking.distributions["int8"], by_session=True).pairs
    assert counted == (6 if keep else 5)


def test_a_race_ends_when_only_the_one_that_the_others_are_compared_with_is_left() -> None:
    """The race ends once the reference is the fastest, because the others need no more rounds, disturbed or not."""
    runners = {
        "float": [Disturbed(0, 0.01) for _ in range(6)],
        "slow": [Disturbed(1000 if session == 5 else 0, 0.02) for session in range(6)],
    }
    ranking = rank_until_settled(runners, rules=SettlingRules(top=1, keep="float", min_rounds=12), bursts=ONE)
    assert (ranking.order, ranking.settled) == (("float", "slow"), True)
    assert ranking.rounds < 50


def test_one_runner_is_in_order_at_once(clock: Any) -> None:
    ranking = rank_until_settled({"a": clock.runner([0.01])}, bursts=ONE, clock=clock)
    assert (ranking.order, ranking.settled) == (("a",), True)


def test_no_runners_are_refused() -> None:
    with pytest.raises(ValueError, match="no runners"):
        rank_until_settled({})


def test_the_same_seed_gives_the_same_run(clock: Any) -> None:
    def log_of(seed: int) -> list[str]:
        log: list[str] = []
        rank_until_settled(
            {n: clock.runner([0.01], log, n) for n in "abc"},
            seed=seed,
            bursts=ONE,
            clock=clock,
            rules=SettlingRules(max_rounds=8),
        )
        return log

    assert log_of(3) == log_of(3) != log_of(4)
