"""Test the choice, and its sentences, if no candidate certainly meets the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from edgeq.tune.goal import Deadline, Goal
from edgeq.tune.search import search
from edgeq.tune.trials import Outcome, Race, Runner
from edgeq.tune.verdict import doubts, met, verdict
from tests.tune.fakes import BusyWith, Clock, Fact, FakeEvaluator, profile
from tests.tune.test_search import candidates

BUSY = "the machine was busy"


@dataclass
class Estimating(FakeEvaluator):
    """Claim no speed, but estimate each to within `spread`."""

    spread: float = 0.2

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        found = super().time(runners, baseline, **how)
        timings = {}
        for name, timing in found.timings.items():
            about = timing.float_ms / timing.latency["p50_ms"] if timing.float_ms else 1.0
            likely = about, about * (1 - self.spread), about * (1 + self.spread)
            claim = timing.speedup and replace(timing.speedup, reason=BUSY, likely=likely)
            timings[name] = replace(timing, speedup=claim)
        return replace(found, timings=timings)


def found(evaluator: FakeEvaluator, *names: str, goal: Goal | None = None, **table: Any) -> Outcome:
    return search(candidates(*names), profile(**table), evaluator, goal or Goal(), Deadline(None, Clock()))


def test_on_a_busy_machine_the_fastest_by_its_estimate_is_chosen_and_its_speed_called_unproven() -> None:
    outcome = found(Estimating({"a": Fact(speed=2), "b": Fact(speed=3)}), "a", "b")
    assert (outcome.chosen, met(outcome, Goal())) == ("b", True)
    first, *_ = verdict(outcome, Goal())
    assert first == "b runs at about 3.00 times float32's speed (estimated, 2.40 to 3.60)"
    assert [line.partition(":")[0] for line in doubts(outcome, Goal())] == ["speed unproven"]
    assert sum(BUSY in line for line in verdict(outcome, Goal())) == 1
    assert not any(BUSY in trial.reason for trial in outcome.trials)


def test_without_an_estimate_something_is_chosen_all_the_same() -> None:
    outcome = found(FakeEvaluator({"a": Fact(speed=2)}, busy=BUSY), "a")
    assert (outcome.chosen, met(outcome, Goal())) == ("a", True)
    assert "a runs at a speed that is not known" in verdict(outcome, Goal())


def test_layers_in_float_that_keep_the_accuracy_are_not_given_up_for_a_speed_that_was_not_measured() -> None:
    facts = {"a": Fact(speed=2, loss=0.05), "a, 1": Fact(speed=1.5, loss=0.002)}
    outcome = found(Estimating(facts, ranked=("n1", "n2")), "a")
    assert outcome.chosen.startswith("a, 1 layers in float")


def test_what_keeps_the_accuracy_by_its_figure_alone_is_chosen_with_its_doubt() -> None:
    goal = Goal(max_drop=0.01)
    outcome = found(FakeEvaluator({"a": Fact(speed=1.31, loss=0.0059, doubt=0.0058)}, total=128), "a", goal=goal)
    assert (outcome.chosen, met(outcome, goal)) == ("a", True)
    (doubt,) = doubts(outcome, goal)
    assert doubt.endswith("it loses 0.59 points on these 128 samples; on many others it may lose up to 1.64 points")
    assert found(FakeEvaluator({"a": Fact(loss=0.0059, doubt=0.0058)}), "a", goal=Goal(strict=True)).chosen == ""


def test_of_those_about_as_fast_the_surest_is_chosen() -> None:
    facts = {
        "a": Fact(speed=2.0, loss=0.009, doubt=0.006),
        "b": Fact(speed=1.9, loss=0.005, doubt=0.004),
        "c": Fact(speed=1.2, loss=0.001, doubt=0.006),
    }
    assert found(FakeEvaluator(facts), "a", "b", "c").chosen == "b"


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"a": Fact(speed=2, loss=0.3), "b": Fact(speed=1.5, loss=0.05)}, "b"),
        ({"a": Fact(speed=0.5), "b": Fact(speed=0.9)}, "b"),
        ({"a": Fact(speed=2, loss=0.3), "b": Fact(speed=0.9, loss=0.001, structure="b")}, "a"),
    ],
)
def test_what_misses_the_goal_is_chosen_as_the_nearest_and_called_so(facts: dict[str, Fact], chosen: str) -> None:
    outcome = found(FakeEvaluator(facts), *facts)
    assert (outcome.chosen, met(outcome, Goal())) == (chosen, False)
    assert verdict(outcome, Goal())[0].startswith("goal missed: no candidate loses at most 1.00 points")
    assert verdict(outcome, Goal())[0].endswith(f"; {chosen} comes closest")


def test_of_what_loses_too_much_the_least_on_fewer_samples_is_measured_in_full() -> None:
    facts = {"a": Fact(speed=2, loss=0.3, width=0.1), "a + recovery": Fact(speed=2, loss=0.1, structure="a")}
    outcome = found(FakeEvaluator(facts, methods=("x",)), "a")
    winner = outcome.winner
    assert winner is not None
    assert (winner.name, winner.assessment is not None and winner.assessment.complete) == ("a + recovery", True)


def test_where_nothing_is_accurate_that_is_what_is_needed_on_a_busy_machine_too() -> None:
    outcome = found(Estimating({"a": Fact(speed=2, loss=0.0523)}), "a")
    assert any(line.startswith("a loses 5.23 points: --max-drop 5.2") for line in verdict(outcome, Goal()))


def test_where_float32_is_faster_the_verdict_says_so() -> None:
    lines = verdict(found(FakeEvaluator({"a": Fact(speed=0.5)}), "a"), Goal())
    assert any(
        line.endswith("0.50 times float32's speed (0.49 to 0.51; 10 → 20 ms): float32 is the better choice")
        for line in lines
    )


def test_an_estimate_that_float32_is_faster_is_no_goal_met() -> None:
    outcome = found(Estimating({"a": Fact(speed=0.7)}), "a")
    assert (outcome.chosen, met(outcome, Goal())) == ("a", False)


def test_what_is_proven_comes_before_what_is_not() -> None:
    evaluator = BusyWith({"a": Fact(speed=2), "b": Fact(speed=3)})
    evaluator.doubtful = "b"
    assert found(evaluator, "a", "b").chosen == "a"


def test_where_nothing_can_be_built_nothing_is_chosen() -> None:
    outcome = found(FakeEvaluator({"a": Fact(error="it has no product")}), "a")
    assert (outcome.chosen, met(outcome, Goal())) == ("", False)
