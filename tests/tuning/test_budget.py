"""Test the time budget of a run: its text, and the clock that tracks it."""

from __future__ import annotations

import pytest

from edgeq.errors import UsageError
from edgeq.tuning.budget import BudgetClock, parse_budget
from tests.tuning.fakes import Clock


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), ("2m5s", 125)]
)
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "  ", "0", "-5m", "ten", "5d", "m", "1m1h", "nan", "9" * 400 + "s"])
def test_text_that_is_no_time_span_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        parse_budget(text)


def test_no_budget() -> None:
    assert parse_budget(None) is None
    endless = BudgetClock(None, Clock())
    assert not endless.passed()
    assert endless.remaining_s(limit=20) == 20


def test_a_deadline_in_shares() -> None:
    clock = Clock(5)
    deadline = BudgetClock(100, clock)
    clock.now = 45
    assert deadline.elapsed_s == 40
    half = deadline.until(0.5)
    assert not half.passed()
    assert half.remaining_s() == 10
    assert half.remaining_s(limit=3) == 3
    clock.now = 80
    assert half.elapsed_s == 75
    assert half.passed()
    assert not deadline.passed()
    assert half.remaining_s() == 0
    assert not BudgetClock(None, clock).until(0.5).passed()
