"""Test which numbers of threads are chosen, and when they are chosen again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edgeq.measure.structure_timing import StructureTiming
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.race import is_unchanged
from tests.tuning.fakes import Fact, FakeEvaluator
from tests.tuning.test_search import run


@pytest.mark.parametrize(("before", "now", "same"), [(1.0, 1.09, True), (1.0, 1.11, False), (1.11, 1.0, False)])
def test_a_choice_holds_while_float32_has_its_speed(before: float, now: float, same: bool) -> None:
    assert is_unchanged(before, StructureTiming({"p50_ms": now})) == same


def test_a_missing_choice_holds() -> None:
    assert is_unchanged(0.0, StructureTiming({"p50_ms": 5.0}))


class Separated(FakeEvaluator):
    """Stop sharing a core between the two processors when the first race of structures begins."""

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        if "a" in runners:
            self.thread_gain = {0: 0.5}
        return super().time(runners, baseline, **how)


def test_threads_are_chosen_again_where_the_first_race_shows_another_machine() -> None:
    evaluator = Separated({"a": Fact(speed=2)}, thread_gain={0: 1.3, 1: 1.2})
    outcome = run(evaluator, "a", threads=(0, 1))
    assert outcome.winner is not None
    assert (outcome.winner.candidate.threads, outcome.baseline_threads) == (0, 0)
    races = [line for line in evaluator.log if line.startswith("race")]
    first, again = (
        [f"race {kind} 0 {when}, {kind} 1 {when}" for kind in ("float32", "int8")] for when in ("first", "again")
    )
    assert races[:6] == [*first, "race float32, a", *again, "race float32, a"]
