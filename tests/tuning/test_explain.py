"""Test the texts that report a search's outcome."""

from __future__ import annotations

from dataclasses import replace

from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.goal import Goal
from edgeq.tuning.search import search
from edgeq.tuning.trials import Outcome
from edgeq.tuning.verdict import describe_verdict
from tests.tuning.fakes import BusyWith, Clock, Fact, FakeEvaluator, profile
from tests.tuning.test_search import candidates


def outcome(facts: dict[str, Fact], goal: Goal, evaluator: FakeEvaluator | None = None) -> Outcome:
    clock = Clock()
    evaluator = evaluator or FakeEvaluator(facts)
    evaluator.clock = clock
    return search(candidates(*facts), profile(), evaluator, goal, BudgetClock(goal.budget_s, clock))


def found(facts: dict[str, Fact], goal: Goal | None = None) -> str:
    goal = replace(goal or Goal(), strict=True)
    return "; ".join(describe_verdict(outcome(facts, goal), goal))


def test_the_winner_its_speed_and_its_loss_come_first() -> None:
    text = found({"a": Fact(speed=2, loss=0.004)})
    assert text.startswith("a runs at 2.00 times float32's speed (1.98 to 2.02; 10 → 5 ms); it loses 0.40 points")
    assert "on 400 samples; 1.00 points were allowed" in text


def test_explains_the_limit_that_lets_the_nearest_miss_through() -> None:
    text = found({"a": Fact(speed=2, loss=0.0123, width=0.01)})
    assert "no candidate loses at most 1.00 points and is faster than float32" in text
    assert "⟨max_drop⟩ 1.24% would let it through" in text or "⟨max_drop⟩ 1.23% would let it through" in text


def test_explains_that_int8_is_not_faster() -> None:
    assert "int8 does not pay here: the fastest, b, has 0.90 times" in found(
        {"a": Fact(speed=0.5), "b": Fact(speed=0.9)}
    )


def test_a_speed_that_is_unclear_counts_only_where_it_may_decide() -> None:
    """The verdict mentions an unclear speed only if it could change the decision.

    A candidate that is as fast as another may be dropped after a race without a claim. That does not affect the others.
    """
    facts = {"a": Fact(speed=0.995), "b": Fact(speed=0.9)}
    doubtful = BusyWith(facts)
    doubtful.doubtful = "b"
    text = "; ".join(describe_verdict(outcome(facts, Goal(strict=True), doubtful), Goal()))
    assert "a keeps the accuracy, at 0.99 times float32's speed" in text
    doubtful = BusyWith(facts)
    doubtful.doubtful = "a"
    text = "; ".join(describe_verdict(outcome(facts, Goal(strict=True), doubtful), Goal()))
    assert "the runs disagree. ⟨resume=True⟩ on a quiet machine measures it again" in text


def test_explains_that_the_accurate_candidate_is_not_faster() -> None:
    assert "a keeps the accuracy, at 1.00 times float32's speed" in found({"a": Fact(speed=1.0)})


def test_explains_that_the_budget_was_short() -> None:
    facts = {f"m{i}": Fact(speed=2 + i) for i in range(10)}
    assert "the budget ended the search" in found(facts, Goal(budget_s=2))
