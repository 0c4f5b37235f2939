"""Test candidates found on this machine's kernels that a simulator of the target confirms or refutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from edgeq.hardware.target import resolve
from edgeq.tuning.goal import Goal
from edgeq.tuning.journal import Journal, JournaledEvaluator
from edgeq.tuning.simulated_record import build_simulated_record, describe_form, summarize
from edgeq.tuning.trials import Outcome
from edgeq.tuning.verdict import describe_shortfall
from tests.tuning.fakes import Clock, Fact, FakeEvaluator
from tests.tuning.test_search import candidates, run

FACTS = {"a": Fact(share=1.0, loss=0.001, structure="a"), "b": Fact(share=0.9, loss=0.002, structure="b")}


def simulations(evaluator: FakeEvaluator) -> list[str]:
    return [line.removeprefix("simulate ") for line in evaluator.log if line.startswith("simulate")]


def test_the_first_candidate_that_holds_in_the_simulator_is_chosen() -> None:
    evaluator = FakeEvaluator(FACTS, timed=False, simulated={"a": 0.004, "b": 0.0})
    outcome = run(evaluator, "a", "b")
    assert outcome.chosen == "a"
    assert simulations(evaluator) == ["a"]
    assert (
        "loses 0.40 points in the simulator (a gain of 0.60 points to a loss of 1.40 points), 24 samples"
        in outcome.trial("a").reason
    )
    assert outcome.trial("b").reason == "not simulated: a keeps the accuracy and costs no more"
    assert outcome.trial("b").status == "qualified"


def test_candidates_that_the_simulator_refutes_are_not_chosen() -> None:
    evaluator = FakeEvaluator(FACTS, timed=False, simulated={"a": 0.3, "b": 0.009})
    outcome = run(evaluator, "a", "b")
    assert outcome.chosen == "b"
    assert simulations(evaluator) == ["a", "b"]
    assert outcome.trial("a").status == "short"
    assert outcome.trial("a").reason.endswith("24 samples; 1.00 points are allowed")


def test_the_search_goes_on_with_recoveries_that_the_simulator_judges() -> None:
    simulated = {"a": 0.3, "b": 0.3, "a + split": 0.005}
    evaluator = FakeEvaluator(FACTS, timed=False, costly=("split",), simulated=simulated)
    assert run(evaluator, "a", "b").chosen == "a + split"
    assert simulations(evaluator)[:3] == ["a", "b", "a + split"]


def raising(
    facts: Mapping[str, Fact],
    simulated: Mapping[str, float],
    methods: tuple[str, ...] = (),
    cut_short: tuple[str, ...] = (),
) -> tuple[FakeEvaluator, Outcome]:
    """Run a search for hardware that allows tensors of 16 bits."""
    facts = {"a": FACTS["a"], "a, all": Fact(wide=1.0), **facts}
    ranked = ("n1", "n2", "n3", "n4", "n5")
    evaluator = FakeEvaluator(
        facts,
        timed=False,
        methods=methods,
        ranked=ranked,
        raised="wide",
        simulated={"a": 0.3, **simulated},
        cut_short=cut_short,
    )
    return evaluator, run(evaluator, "a", wide=[[]])


def test_the_search_goes_on_with_more_tensors_in_16_bits() -> None:
    simulated = {"a, all": 0.001, "a, 2": 0.04, "a, 4": 0.002, "a, 3": 0.009}
    evaluator, outcome = raising({"a, 3": Fact(wide=0.3), "a, 4": Fact(wide=0.4)}, simulated)
    assert simulations(evaluator)[:2] == ["a", "a, all tensors in 16 bits"]
    assert outcome.chosen == "a, 3 tensors in 16 bits"
    assert outcome.trial(outcome.chosen).candidate.scheme.wide == ("n1", "n2", "n3")
    record = build_simulated_record(resolve("hexagon-v73"), Goal(), outcome, 1.0)
    assert record["chosen"]["wide"] == ["n1", "n2", "n3"]
    assert record["chosen"]["simulator"]["samples"] == 24
    assert "0.90 points in the simulator" in describe_form(record)
    assert "0.90 points in the simulator" in summarize(record)["loss"]
    assert "n1, n2, n3" in summarize(record)["on 16 bits"]


def test_all_tensors_in_16_bits_are_an_answer_where_fewer_are_too_few() -> None:
    _, outcome = raising({}, {"a, all": 0.004})
    assert outcome.chosen == "a, all tensors in 16 bits"
    assert outcome.trial(outcome.chosen).candidate.scheme.wide == ("*",)
    assert summarize(build_simulated_record(resolve("hexagon-v73"), Goal(), outcome, 1.0))["on 16 bits"].startswith(
        "100.0%"
    )


def test_luck_on_few_samples_does_not_replace_what_holds_on_many() -> None:
    facts = {"a, 1": Fact(wide=0.1), "a, 2": Fact(wide=0.2)}
    simulated = {"a, all": 0.004, "a, 1": 0.002, "a, 2": 0.004}
    assert raising(facts, simulated)[1].chosen == "a, 1 tensors in 16 bits"
    lucky = raising(facts, simulated, cut_short=("a, 1",))[1]
    assert lucky.chosen == "a, all tensors in 16 bits"
    assert lucky.trial("a, 1 tensors in 16 bits").reason.endswith(
        "8 samples; a, all tensors in 16 bits keeps the accuracy on more"
    )
    sure = raising(facts, {**simulated, "a, 1": 0.0}, cut_short=("a, 1",))[1]
    assert sure.chosen == "a, 1 tensors in 16 bits"


def test_fewer_16_bit_tensors_are_tried_if_all_lose_slightly_too_much() -> None:
    """If all tensors in 16 bits lose slightly too much, fewer are tried: a difference of roundings is chance."""
    facts = {"a, all": Fact(wide=1.0, loss=0.011, width=0.002), "a, 2": Fact(wide=0.2, loss=0.009)}
    assert raising(facts, {"a, 2": 0.009})[1].chosen == "a, 2 tensors in 16 bits"


def test_fewer_16_bit_tensors_are_not_tried_if_all_lose_far_too_much() -> None:
    evaluator, outcome = raising({"a, all": Fact(wide=1.0, loss=0.2)}, {})
    assert not outcome.chosen
    assert [line for line in evaluator.log if line.startswith("build")] == [
        "build a",
        "build a, all tensors in 16 bits",
    ]


def test_all_tensors_get_16_bits_first_after_recoveries() -> None:
    base = "a + recovery"
    facts = {base: FACTS["a"], f"{base}, all": Fact(wide=1.0), f"{base}, 1": Fact(wide=0.1)}
    simulated = {base: 0.2, f"{base}, all": 0.0, f"{base}, 1": 0.0}
    evaluator, outcome = raising(facts, simulated, methods=("x", "y"))
    assert outcome.chosen == f"{base}, 1 tensors in 16 bits"
    assert simulations(evaluator)[-2:] == [f"{base}, all tensors in 16 bits", f"{base}, 1 tensors in 16 bits"]


def test_the_goal_is_missed_by_the_figure_of_the_simulator() -> None:
    evaluator = FakeEvaluator(FACTS, timed=False, simulated={"a": 0.3, "b": 0.2})
    outcome = run(evaluator, "a", "b")
    assert outcome.winner is None
    problem = describe_shortfall(resolve("hexagon-v73"), Goal(), outcome)
    assert problem.startswith("goal missed: no form for hexagon-v73 loses at most 0.01 in simulation: the best, 0.2000")
    assert "in the simulator" in problem


def test_candidates_that_crash_in_the_simulator_are_left_out() -> None:
    outcome = run(FakeEvaluator(FACTS, timed=False, simulated={"a": -1.0, "b": 0.0}), "a", "b")
    assert outcome.chosen == "b"
    assert outcome.trial("a").reason == "the process of the engine ended: signal SIGSEGV"


def test_a_budget_that_is_over_leaves_the_best_simulated_and_drops_the_others() -> None:
    clock = Clock()
    evaluator = FakeEvaluator(FACTS, timed=False, simulated={"a": 0.3, "b": 0.0}, clock=clock, total=40)
    outcome = run(evaluator, "a", "b", goal=Goal(budget_s=10))
    assert simulations(evaluator) == ["a"]
    assert outcome.trial("b").reason == "the budget ran out before it was simulated"
    assert outcome.chosen == ""


def test_a_simulation_is_not_run_again(tmp_path: Path) -> None:
    first = FakeEvaluator(FACTS, timed=False, simulated={"a": 0.3, "b": 0.0})
    (one,) = candidates("a")
    found = [
        JournaledEvaluator(evaluator, Journal(tmp_path / "j", {}, resume=True)).simulate(one, 0.01, 9.0)
        for evaluator in (first, FakeEvaluator({}))
    ]
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0].drop == pytest.approx(0.3)
