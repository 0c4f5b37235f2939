"""Test layers that are slower in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.goal import Goal
from edgeq.tuning.local import find_slower_layers
from edgeq.tuning.race import list_prefixes
from edgeq.tuning.search import search
from edgeq.tuning.space import Candidate, in_float, kernel_candidates
from tests.tuning.fakes import Clock, Fact, FakeEvaluator, profile
from tests.tuning.test_search import run

KERNEL = "U8S8 per-channel, minmax"


def test_layers_by_what_they_lose() -> None:
    float_us = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "only here": 5.0}
    int8_us = {"a": 150.0, "b": 50.0, "c": 300.0, "d": 100.1, "only there": 5.0}
    assert find_slower_layers([*float_us, *int8_us], float_us, int8_us) == ("c", "a")


def test_ever_longer_beginnings() -> None:
    assert [len(b) for b in list_prefixes("abcdefg")] == [1, 2, 4, 7]
    assert [len(b) for b in list_prefixes("abcd")] == [1, 2, 4]
    assert list_prefixes("a") == [("a",)]
    assert list_prefixes("") == []


def test_names_tell_what_is_in_float() -> None:
    first = kernel_candidates(profile())[0]
    mixed = in_float(first, ["x", "y"])
    assert mixed.name == f"{KERNEL} (2 in float)"
    assert mixed.scheme.exclude == ("x", "y")
    assert in_float(mixed, ["z"]).scheme.exclude == ("x", "y", "z")


def test_the_fastest_mixture_wins_and_methods_are_tried_on_it() -> None:
    facts = {
        KERNEL: Fact(speed=1.2, loss=0.02),
        f"{KERNEL} (1 in float)": Fact(speed=1.5, loss=0.02),
        f"{KERNEL} (2 in float)": Fact(speed=1.8, loss=0.02),
        f"{KERNEL} (3 in float)": Fact(speed=1.4, loss=0.02),
        "U8S8 per-channel, mse (2 in float)": Fact(speed=1.8, loss=0.001),
    }
    evaluator = FakeEvaluator(facts, slow=("a", "b", "c"))
    outcome = run(evaluator, KERNEL, method=["minmax", "mse"])
    assert outcome.chosen == "U8S8 per-channel, mse (2 in float)"
    assert outcome.winner is not None
    assert outcome.winner.candidate.scheme.exclude == ("a", "b")
    assert "1.50 times the latency of U8S8 per-channel, minmax (2 in float)" in outcome.trial(KERNEL).reason
    assert "U8S8 per-channel, mse" not in [t.name for t in outcome.trials]


@pytest.mark.parametrize("ahead", [1.0, 1.05])
def test_the_most_accurate_of_equally_fast_choices_gets_float_layers(ahead: float) -> None:
    other = "U8S8 per-channel 7-bit, minmax"
    facts = {
        KERNEL: Fact(speed=1.2, sqnr_db=30),
        other: Fact(speed=1.2 * ahead, sqnr_db=25),
        f"{KERNEL} (1 in float)": Fact(speed=1.5),
        f"{other} (1 in float)": Fact(speed=1.5),
    }
    one = replace(profile(reduce_range=[True, False]), hazards={"saturates_int16": ["U8S8"]})
    found = kernel_candidates(replace(one, scheme=one.scheme.replace(reduce_range=True)))
    assert [c.name for c in found] == [other, KERNEL]
    evaluator = FakeEvaluator(facts, slow=("a",))
    outcome = search(found, one, evaluator, Goal(), BudgetClock(None, Clock()))
    assert outcome.chosen == f"{KERNEL} (1 in float)"
    assert f"{other} (1 in float)" not in [t.name for t in outcome.trials]


def test_on_a_busy_machine_no_form_is_dropped_as_slower() -> None:
    facts = {KERNEL: Fact(speed=1.2), f"{KERNEL} (1 in float)": Fact(speed=1.25)}
    outcome = run(FakeEvaluator(facts, slow=("a",), busy="the machine was busy"), KERNEL)
    why = "it runs at a speed that is not known"
    assert outcome.trial(KERNEL).reason == f"not distinguishable in speed from {KERNEL} (1 in float): {why}"
    assert not [trial for trial in outcome.trials if "times the latency" in trial.reason]
    quiet = run(FakeEvaluator(facts, slow=("a",)), KERNEL)
    assert quiet.trial(KERNEL).reason == f"1.04 times the latency of {KERNEL} (1 in float)"
    assert quiet.chosen == f"{KERNEL} (1 in float)"


def test_a_kernel_choice_slower_than_float_is_saved_by_it() -> None:
    facts = {KERNEL: Fact(speed=0.9), f"{KERNEL} (1 in float)": Fact(speed=1.2)}
    assert run(FakeEvaluator(facts, slow=("a",)), KERNEL).chosen == f"{KERNEL} (1 in float)"


def test_a_goal_of_size_keeps_layers_in_float_only_if_needed() -> None:
    facts = {KERNEL: Fact(speed=1.2, bytes=50), f"{KERNEL} (1 in float)": Fact(speed=1.5, bytes=60)}
    assert run(FakeEvaluator(facts, slow=("a",)), KERNEL, goal=Goal("size")).chosen == KERNEL
    facts[KERNEL] = Fact(speed=0.9, bytes=50)
    assert run(FakeEvaluator(facts, slow=("a",)), KERNEL, goal=Goal("size")).chosen == f"{KERNEL} (1 in float)"


def test_nothing_slow_leaves_all_as_it_was() -> None:
    evaluator = FakeEvaluator({KERNEL: Fact(speed=2)})
    outcome = run(evaluator, KERNEL)
    assert outcome.chosen == KERNEL
    assert len(outcome.trials) == 1
    assert isinstance(outcome.trials[0].candidate, Candidate)


def test_two_races_are_compared_by_what_float32_took_in_each() -> None:
    """Results of two races are compared by their ratios to float32 in the same race.

    Here the machine becomes twice as fast, so "b + recovery" has a lower median than "c" had before.
    """

    class FasterLater(FakeEvaluator):
        def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
            self.float_ms = 5.0 if "b + recovery" in runners else 10.0
            return super().time(runners, baseline, **how)

    facts = {
        "b": Fact(speed=2.5, loss=0.04),
        "b + recovery": Fact(speed=1.5),
        "c": Fact(speed=2.8, loss=0.05),
        "c + recovery": Fact(speed=2.8),
    }
    assert run(FasterLater(facts, methods=("x",)), "b", "c").chosen == "c + recovery"
