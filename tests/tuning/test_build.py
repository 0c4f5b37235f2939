"""Test the building and first assessment of candidates in engines that compile each one for seconds."""

from __future__ import annotations

import pytest

from edgeq.errors import BoardError
from edgeq.hardware.profile import load_profiles
from edgeq.run.engines import choose_engine
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.build import build, build_forms
from edgeq.tuning.goal import Goal
from edgeq.tuning.measurements import Screening
from edgeq.tuning.space import Candidate, in_engine, kernel_candidates, method_candidates
from edgeq.tuning.trials import Trials
from tests.tuning.fakes import Clock, Fact, FakeEvaluator

PROFILE = load_profiles()["x86-64-avx512-vnni"]


def started(evaluator: FakeEvaluator) -> tuple[Trials, Candidate]:
    """Return a table with one kernel choice in onnxruntime's own kernels and in an engine."""
    own = kernel_candidates(PROFILE)[0]
    kernel = in_engine(own, choose_engine("openvino"))
    evaluator.facts = {kernel.name: Fact(structure="engine"), **evaluator.facts}
    table = Trials(evaluator, Goal(), BudgetClock(100, Clock()))
    assert build(table, own)
    assert build(table, kernel)
    return table, kernel


def built_in_engine(evaluator: FakeEvaluator) -> list[str]:
    return [line.removeprefix("build ") for line in evaluator.log if line.endswith(" in openvino")][1:]


def test_the_two_methods_that_follow_float32_best_are_tried_in_an_engine() -> None:
    evaluator = FakeEvaluator({})
    table, kernel = started(evaluator)
    methods = [c.name for c in method_candidates(kernel, PROFILE)]
    assert len(methods) > 3
    own = [name.removesuffix(" in openvino") for name in methods]
    better = {own[1]: Fact(sqnr_db=35), own[2]: Fact(error="an operator is not known"), own[3]: Fact(sqnr_db=34)}
    evaluator.facts = dict.fromkeys(own, Fact()) | better
    build_forms(table, PROFILE)
    assert built_in_engine(evaluator) == [methods[1], methods[3]]


def test_none_is_tried_after_the_deadline() -> None:
    clock = Clock()
    evaluator = FakeEvaluator({}, clock=clock)
    table, _ = started(evaluator)
    table.deadline = BudgetClock(2.5, clock)
    before = len(evaluator.log)
    build_forms(table, PROFILE)
    own = [line for line in evaluator.log[before:] if not line.endswith(" in openvino")]
    assert len(own) == 3, "a second each"
    assert len(built_in_engine(evaluator)) == 1, "the first is built whatever the time is"


def test_a_method_that_gives_the_file_of_another_is_none_of_the_two() -> None:
    evaluator = FakeEvaluator({})
    table, kernel = started(evaluator)
    methods = [c.name for c in method_candidates(kernel, PROFILE)]
    own = [name.removesuffix(" in openvino") for name in (kernel.name, *methods)]
    ranked = {name: Fact(sqnr_db=35 - place / 10, content=name) for place, name in enumerate(own)}
    same = {own[1]: Fact(sqnr_db=35, content=own[0]), own[3]: Fact(sqnr_db=34.8, content=own[2])}
    evaluator.facts |= ranked | same
    build_forms(table, PROFILE)
    assert built_in_engine(evaluator) == [methods[1], methods[3]]


def test_methods_are_compared_with_one_kernel_choice_for_all_engines() -> None:
    """Methods are compared with one kernel choice, and builds for onnxruntime's own kernels are not repeated."""
    evaluator = FakeEvaluator({})
    table = Trials(evaluator, Goal(), BudgetClock(100, Clock()))
    own = kernel_candidates(PROFILE)[0]
    methods = [c.name for c in method_candidates(own, PROFILE)]
    evaluator.facts = dict.fromkeys(methods, Fact()) | {methods[-1]: Fact(sqnr_db=35), methods[-2]: Fact(sqnr_db=34)}
    other = in_engine(kernel_candidates(PROFILE)[1], choose_engine("openvino"))
    evaluator.facts |= {own.name: Fact(structure="own"), other.name: Fact(structure="other")}
    assert build(table, own)
    assert build(table, other)
    before = len(evaluator.log)
    build_forms(table, PROFILE)
    assert len(evaluator.log) - before == len(methods) + 2
    ending = {name.partition(", ")[2] for name in methods[-2:]}
    assert {name.removesuffix(" in openvino").partition(", ")[2] for name in built_in_engine(evaluator)} == ending


class CutOff(FakeEvaluator):
    def build(self, candidate: Candidate) -> Screening:
        if not candidate.name.removesuffix(" in openvino").endswith("minmax"):
            raise BoardError("the link was cut")
        return super().build(candidate)


def test_a_board_that_is_cut_off_says_nothing_of_a_method() -> None:
    evaluator = CutOff({})
    table, _ = started(evaluator)
    with pytest.raises(BoardError):
        build_forms(table, PROFILE)
