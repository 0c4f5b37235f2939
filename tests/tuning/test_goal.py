from __future__ import annotations

import pytest

from edgeq.errors import UsageError
from edgeq.tuning.goal import BudgetClock, Goal, as_goal, parse_budget
from tests.tuning.fakes import Clock


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), ("2m5s", 125)]
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "  ", "0", "-5m", "ten", "5d", "m", "1m1h", "nan", "9" * 400 + "s"])
def test_refuses_budgets_without_a_known_unit(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_budget(text)


def test_no_budget() -> None:
    assert parse_budget(None) is None
    endless = BudgetClock(None, Clock())
    assert not endless.passed()
    assert endless.left_s(most=20) == 20


def test_a_deadline_in_shares() -> None:
    clock = Clock(5)
    deadline = BudgetClock(100, clock)
    clock.now = 45
    assert deadline.elapsed_s == 40
    half = deadline.until(0.5)
    assert not half.passed()
    assert half.left_s() == 10
    assert half.left_s(most=3) == 3
    clock.now = 80
    assert half.elapsed_s == 75
    assert half.passed()
    assert not deadline.passed()
    assert half.left_s() == 0
    assert not BudgetClock(None, clock).until(0.5).passed()


@pytest.mark.parametrize(
    "wrong",
    [
        {"objective": "joy"},
        {"max_drop": -0.1},
        {"max_drop": 2},
        {"max_drop": "0.1"},
        {"budget_s": 0},
        {"budget_s": "60s"},
    ],
)
def test_goals_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Goal(**wrong)  # type: ignore[arg-type]


def test_a_goal_by_its_objective() -> None:
    assert as_goal("size") == Goal("size")
    assert as_goal(None) == Goal()
    assert as_goal(Goal(max_drop=0.5)) == Goal(max_drop=0.5)
    with pytest.raises(UsageError, match="objective is 'sise'"):
        as_goal("sise")
    with pytest.raises(UsageError, match="the goal is given as float"):
        as_goal(0.01)  # type: ignore[arg-type]
