"""Test the goal of a run: impossible limits are refused, and an objective alone is a goal."""

from __future__ import annotations

import pytest

from edgeq.errors import UsageError
from edgeq.tuning.goal import Goal, as_goal


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
