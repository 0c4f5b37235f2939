"""Test the choice, and its sentences, if no candidate certainly meets the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from edgeq_device.measure.claim import Claim

from edgeq.measure.structure_timing import StructureTiming
from edgeq.run.engines import as_engine
from edgeq.scheme import Scheme
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.comparison import judge_speed
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.goal import DOUBTFUL, MISSED, Goal
from edgeq.tuning.search import search
from edgeq.tuning.sentences import describe_speed_against_float
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Outcome
from edgeq.tuning.verdict import describe_doubts, describe_verdict, is_goal_met
from tests.tuning.fakes import BusyWith, Clock, Fact, FakeEvaluator, profile
from tests.tuning.test_search import candidates

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
    return search(candidates(*names), profile(**table), evaluator, goal or Goal(), BudgetClock(None, Clock()))


def test_on_a_busy_machine_the_fastest_by_its_estimate_is_chosen_and_its_speed_called_unproven() -> None:
    outcome = found(Estimating({"a": Fact(speed=2), "b": Fact(speed=3)}), "a", "b")
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("b", True)
    first, *_ = describe_verdict(outcome, Goal())
    assert first == "b runs at about 3.00 times float32's speed (estimated, 2.40 to 3.60)"
    assert [line.partition(":")[0] for line in describe_doubts(outcome, Goal())] == ["speed unproven"]
    assert sum(BUSY in line for line in describe_verdict(outcome, Goal())) == 1
    assert not any(BUSY in trial.reason for trial in outcome.trials)


def test_an_estimate_does_not_compare_two_engines() -> None:
    """Next to other work, engines wait for cores in different ways, so only a settled interval counts."""
    (trial, *_) = found(Estimating({"a": Fact(speed=2)}), "a").trials
    there = replace(trial, candidate=replace(trial.candidate, engine=as_engine("openvino")))
    assert (judge_speed(trial, Goal()), judge_speed(there, Goal())) == (DOUBTFUL, MISSED)


def test_without_an_estimate_something_is_chosen_but_the_goal_is_not_met() -> None:
    outcome = found(FakeEvaluator({"a": Fact(speed=2)}, busy=BUSY), "a")
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("a", False)
    assert "a runs at a speed that is not known" in describe_verdict(outcome, Goal())


def test_layers_in_float_that_keep_the_accuracy_are_not_given_up_for_a_speed_that_was_not_measured() -> None:
    facts = {"a": Fact(speed=2, loss=0.05), "a, 1": Fact(speed=1.5, loss=0.002)}
    outcome = found(Estimating(facts, ranked=("n1", "n2")), "a")
    assert outcome.chosen.startswith("a, 1 layers in float")


def test_candidates_within_the_point_estimate_are_chosen_with_a_doubt() -> None:
    goal = Goal(max_drop=0.01)
    outcome = found(FakeEvaluator({"a": Fact(speed=1.31, loss=0.0059, doubt=0.0058)}, total=128), "a", goal=goal)
    assert (outcome.chosen, is_goal_met(outcome, goal)) == ("a", True)
    (doubt,) = describe_doubts(outcome, goal)
    assert doubt.endswith("it loses 0.59 points on these 128 samples; on many others it may lose up to 1.64 points")
    assert found(FakeEvaluator({"a": Fact(loss=0.0059, doubt=0.0058)}), "a", goal=Goal(strict=True)).chosen == ""


def test_the_surest_of_equally_fast_candidates_is_chosen() -> None:
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
def test_the_nearest_miss_is_chosen_and_called_so(facts: dict[str, Fact], chosen: str) -> None:
    outcome = found(FakeEvaluator(facts), *facts)
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == (chosen, False)
    assert describe_verdict(outcome, Goal())[0].startswith("goal missed: no candidate loses at most 1.00 points")
    assert describe_verdict(outcome, Goal())[0].endswith(f"; {chosen} comes closest")


def test_the_smallest_loss_on_few_samples_is_measured_in_full() -> None:
    facts = {"a": Fact(speed=2, loss=0.3, width=0.1), "a + recovery": Fact(speed=2, loss=0.1, structure="a")}
    outcome = found(FakeEvaluator(facts, methods=("x",)), "a")
    winner = outcome.winner
    assert winner is not None
    assert (winner.name, winner.assessment is not None and winner.assessment.complete) == ("a + recovery", True)


def test_names_the_needed_limit_on_a_busy_machine() -> None:
    outcome = found(Estimating({"a": Fact(speed=2, loss=0.0523)}), "a")
    assert any(line.startswith("a loses 5.23 points: ⟨max_drop⟩ 5.2") for line in describe_verdict(outcome, Goal()))


def test_the_verdict_says_that_float32_is_faster() -> None:
    lines = describe_verdict(found(FakeEvaluator({"a": Fact(speed=0.5)}), "a"), Goal())
    assert any(
        line.endswith("0.50 times float32's speed (0.49 to 0.51; 10 → 20 ms): float32 is the better choice")
        for line in lines
    )


def test_an_estimate_that_float32_is_faster_is_no_goal_met() -> None:
    outcome = found(Estimating({"a": Fact(speed=0.7)}), "a")
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("a", False)


def test_proven_candidates_come_before_unproven_ones() -> None:
    evaluator = BusyWith({"a": Fact(speed=2), "b": Fact(speed=3)})
    evaluator.doubtful = "b"
    assert found(evaluator, "a", "b").chosen == "a"


def test_chooses_nothing_without_a_build() -> None:
    outcome = found(FakeEvaluator({"a": Fact(error="it has no product")}), "a")
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("", False)


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("speed", [0.65, 0.99, 1.04])
def test_an_estimate_that_merely_reaches_float32_is_no_better_than_a_settled_figure(
    speed: float, spread: float
) -> None:
    """The wider a spread is, the further it reaches. That must not let the least certain candidate win."""
    settled = Fact(speed=0.96, structure="settled")
    evaluator = BusyWith({"settled": settled, "rough": Fact(speed=speed, structure="rough")})
    evaluator.doubtful, evaluator.spread = "rough", spread
    outcome = found(evaluator, "settled", "rough")
    assert not is_goal_met(outcome, Goal())
    assert outcome.chosen == ("rough" if speed > 0.96 else "settled")
    assert describe_verdict(outcome, Goal())[0].endswith(f"; {outcome.chosen} comes closest")


@pytest.mark.parametrize("accurate", [True, False])
def test_the_fastest_int8_form_is_kept_although_it_was_dropped_as_slower_than_float32(accurate: bool) -> None:
    facts = {
        "slow": Fact(speed=0.8, structure="slow"),
        "fast": Fact(speed=0.95, structure="fast", loss=0.0 if accurate else 0.3),
        "none": Fact(speed=0.5, structure="none"),
    }
    outcome = found(FakeEvaluator(facts), *facts)
    assert "slower than float32: 0.80 times its speed" in outcome.trial("slow").reason
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("fast" if accurate else "slow", False)


def test_an_unquantized_form_is_not_the_nearest_while_there_is_one_in_int8() -> None:
    int8, floating = candidates("int8")[0], Candidate("unquantized", Scheme(mode="float"))
    evaluator = FakeEvaluator({"int8": Fact(speed=0.9), "unquantized": Fact(speed=0.99, sqnr_db=130)})
    outcome = search((int8, floating), profile(), evaluator, Goal(), BudgetClock(None, Clock()))
    assert (outcome.chosen, is_goal_met(outcome, Goal())) == ("int8", False)


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Claim(2.2, 1.9, 2.4, 0.95, 6), "faster than float32: 2.20 times its speed (1.90 to 2.40)"),
        (Claim(0.8, 0.7, 0.9, 0.95, 6), "slower than float32: 0.80 times its speed (0.70 to 0.90)"),
        (
            Claim(1.02, 0.9, 1.1, 0.95, 6),
            "no difference in speed from float32 is settled: 1.02 times its speed (0.90 to 1.10)",
        ),
        (
            Claim(reason=BUSY, likely=(2.22, 1.61, 3.09)),
            "faster than float32 only by an estimate: about 2.22 times its speed (estimated, 1.61 to 3.09)",
        ),
        (
            Claim(reason=BUSY, likely=(0.6, 0.5, 0.8)),
            "slower than float32 only by an estimate: about 0.60 times its speed (estimated, 0.50 to 0.80)",
        ),
        (
            Claim(reason=BUSY, likely=(1.2, 0.9, 1.5)),
            "it is not shown to be faster than float32: about 1.20 times its speed (estimated, 0.90 to 1.50)",
        ),
        (Claim(reason=BUSY), f"its speed is not known: {BUSY}"),
    ],
)
def test_the_words_and_the_figures_agree(claim: Claim, text: str) -> None:
    assert describe_speed_against_float(StructureTiming({"p50_ms": 1.0}, claim, 2.0)) == text
