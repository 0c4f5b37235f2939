"""Test the decisions of the search on made-up figures."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from rich.console import Console

from edgeq.cli.build import _draw_timed
from edgeq.scheme import Scheme
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.evaluator import Race, Runner
from edgeq.tuning.goal import Goal
from edgeq.tuning.measurements import Assessment
from edgeq.tuning.search import search
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Outcome
from edgeq.tuning.verdict import describe_verdict
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import plain
from tests.tuning.fakes import BusyWith, Clock, Fact, FakeEvaluator, Notes, profile


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name, Scheme()) for name in names]


def run(
    evaluator: FakeEvaluator,
    *names: str,
    goal: Goal | None = None,
    threads: tuple[int, ...] = (0,),
    progress: Progress = SILENT,
    **table: Any,
) -> Outcome:
    goal = replace(goal or Goal(), strict=True)  # test_nearest.py tests other choices
    deadline = BudgetClock(goal.budget_s, evaluator.clock or Clock())
    return search(candidates(*names), profile(**table), evaluator, goal, deadline, threads=threads, progress=progress)


def test_the_fastest_that_keeps_its_accuracy_wins() -> None:
    facts = {"a": Fact(speed=2), "b": Fact(speed=4, loss=0.2), "c": Fact(speed=3, loss=0.009)}
    outcome = run(FakeEvaluator(facts), "a", "b", "c")
    assert outcome.chosen == "c"
    assert outcome.trial("a").status == "qualified"
    assert "1.50 times the latency of c" in outcome.trial("a").reason
    assert outcome.trial("b").status == "eliminated"
    assert "97.5 % sure" in outcome.trial("b").reason


def test_the_one_that_leads_is_named_once() -> None:
    facts = {"a": Fact(speed=4, loss=0.2, early=0.0), "b": Fact(speed=2), "a + x": Fact(speed=4, loss=0.1)}
    notes = Notes()
    run(FakeEvaluator(facts, methods=("x", "y")), "a", "b", progress=notes)
    leading = [text for text in notes.texts if text.startswith("best so far")]
    assert len(leading) > 1
    assert all(one != other for one, other in pairwise(leading))


def test_slower_than_float_is_never_chosen_however_accurate() -> None:
    outcome = run(FakeEvaluator({"a": Fact(speed=0.8)}), "a")
    assert outcome.chosen == ""
    assert outcome.winner is None
    assert "slower than float32: 0.80" in outcome.trial("a").reason


def test_as_fast_as_float_is_not_faster() -> None:
    outcome = run(FakeEvaluator({"a": Fact(speed=1.005)}), "a")
    assert outcome.chosen == ""
    assert outcome.trial("a").reason.startswith("no difference in speed from float32 is settled: 1.00 times its speed")


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_a_smaller_one_need_only_keep_up_with_float(objective: Any) -> None:
    facts = {"a": Fact(speed=2, bytes=90), "b": Fact(speed=1.005, bytes=50), "c": Fact(speed=0.9, bytes=10)}
    outcome = run(FakeEvaluator(facts), "a", "b", "c", goal=Goal(objective))
    assert outcome.chosen == "b"
    assert "slower" in outcome.trial("c").reason


def test_within_a_tie_the_more_accurate_wins() -> None:
    facts = {"a": Fact(speed=3.0, loss=0.004), "b": Fact(speed=2.98, loss=0.001)}
    assert run(FakeEvaluator(facts), "a", "b").chosen == "b"


def test_accuracy_does_not_outweigh_a_clear_difference_in_speed() -> None:
    facts = {"a": Fact(speed=3.0, loss=0.004), "b": Fact(speed=2.9, loss=0.001)}
    assert run(FakeEvaluator(facts), "a", "b").chosen == "a"
    sizes = {"a": Fact(speed=3, bytes=10, loss=0.004), "b": Fact(speed=3, bytes=20, structure="b")}
    small = run(FakeEvaluator(sizes), "a", "b", goal=Goal("size"))
    assert small.chosen == "a", "where size counts, equal speed is not a tie"


def test_a_doubtful_candidate_is_passed_over_for_one_that_keeps_its_accuracy() -> None:
    facts = {"a": Fact(speed=3, loss=0.004, doubt=0.008), "b": Fact(speed=2, loss=0.004, doubt=0.001)}
    outcome = run(FakeEvaluator(facts), "a", "b")
    assert outcome.chosen == "b"
    assert (
        "loses 0.40 points, up to 1.85 points over many other samples; 1.00 points are allowed"
        in outcome.trial("a").reason
    )


def test_one_figure_is_reported_for_the_loss_and_its_bound() -> None:
    outcome = run(FakeEvaluator({"a": Fact(loss=0.004, doubt=0.002)}), "a")
    assert outcome.winner is not None
    assert outcome.winner.reason.endswith("loses 0.40 points, up to 0.76 points over many other samples")
    text = "; ".join(describe_verdict(outcome, Goal()))
    assert "it loses 0.40 points (0.30 points to 0.50 points)" in text
    expected = "on many other samples it may lose up to 0.76 points, on 400 others up to 0.76 points"
    assert f"{expected} (nine chances of ten)" in text
    assert plain(outcome)["candidates"][0]["accuracy"]["bound"] == pytest.approx(0.004 + 1.8124 * 0.002, rel=1e-3)


def test_the_chosen_model_is_in_the_table_though_a_rival_seems_faster_and_as_accurate() -> None:
    facts = {"a": Fact(speed=3.0, loss=0.004), "b": Fact(speed=2.99, loss=0.0039)}
    outcome = run(FakeEvaluator(facts), "a", "b")
    assert outcome.chosen == "b"
    one = {"latency": {"p50_ms": 1.0}, "speedup": {"estimate": 2.0}}
    shown = [{**plain(t), "timing": one, "pareto": t.name == "a"} for t in outcome.trials]
    record = {"verdict": ["fast", "it loses little"], "goal_met": True, "doubts": [], "needed": [], "chosen": "b"}
    record |= {"runners_up": {}, "candidates": shown, "elapsed_s": 1.0}
    record["float32"] = {"timing": {"latency": {"p50_ms": 2.0}}, "bytes": 100}
    drawn = io.StringIO()
    console = Console(file=drawn, width=150)
    for line in _draw_timed(record, verbose=False):
        console.print(line)
    assert drawn.getvalue().startswith("fast; it loses little")
    assert re.search(r"^.*\bb .* 0\.39 .* chosen", drawn.getvalue(), re.MULTILINE)


def test_a_failed_build_says_why_and_stops_no_other() -> None:
    outcome = run(FakeEvaluator({"a": Fact(error="no kernel for it"), "b": Fact()}), "a", "b")
    assert outcome.trial("a").reason == "no kernel for it"
    assert outcome.chosen == "b"


def test_the_same_model_is_measured_once() -> None:
    facts = {"a": Fact(content="same"), "b": Fact(content="same")}
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, "a", "b")
    assert outcome.trial("b").reason == "the same model as a"
    assert not [line for line in evaluator.log if line.startswith("assess b")]


def test_nothing_in_int8_is_nothing_won() -> None:
    outcome = run(FakeEvaluator({"a": Fact(share=0.0)}), "a")
    assert outcome.trial("a").reason == "none of it runs in int8"


def test_one_structure_is_timed_once_and_its_methods_share_the_figure() -> None:
    facts = {
        "U8S8": Fact(structure="s", loss=0.02),
        "U8S8 per-channel, mse": Fact(structure="s", loss=0.001),
    }
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, "U8S8 per-channel, minmax", method=["minmax", "mse"])
    assert outcome.chosen == "U8S8 per-channel, mse"
    kernels, last = (line for line in evaluator.log if line.startswith("race"))
    assert kernels == "race float32, U8S8 per-channel, minmax"
    assert last == "race float32, U8S8 per-channel, mse"
    assert outcome.trial("U8S8 per-channel, minmax").timing == outcome.trial("U8S8 per-channel, mse").timing


def test_a_method_far_behind_in_sqnr_is_not_measured() -> None:
    facts = {"U8S8": Fact(structure="s"), "U8S8 per-channel, mse": Fact(structure="s", sqnr_db=10)}
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, "U8S8 per-channel, minmax", method=["minmax", "mse"])
    assert "SQNR is 20 dB lower" in outcome.trial("U8S8 per-channel, mse").reason
    assert not [line for line in evaluator.log if line.startswith("assess U8S8 per-channel, mse")]


def test_a_thorough_search_dismisses_nothing_early() -> None:
    facts = {
        "U8S8": Fact(structure="s", loss=0.02),
        "U8S8 per-channel, mse": Fact(structure="s", sqnr_db=10, loss=0.001, early=0.5),
    }
    kernel, methods = "U8S8 per-channel, minmax", ["minmax", "mse"]
    short = FakeEvaluator(facts)
    assert run(short, kernel, method=methods).chosen == ""
    evaluator = FakeEvaluator(facts)
    assert run(evaluator, kernel, goal=Goal(thorough=True), method=methods).chosen == "U8S8 per-channel, mse"
    assert {line.split()[-1] for line in evaluator.log if line.startswith("assess")} == {str(evaluator.total)}


def test_a_thorough_search_recovers_what_is_hardly_faster_too() -> None:
    facts = {
        "a": Fact(speed=2, loss=0.05),
        "a + recovery": Fact(speed=1.8),
        "b": Fact(speed=2.1, loss=0.3),
        "b + recovery": Fact(speed=2.1),
    }
    evaluator = FakeEvaluator(facts, methods=("x",))
    assert run(evaluator, "a", "b", goal=Goal(thorough=True)).chosen == "b + recovery"


class Crowded(FakeEvaluator):
    """Let another program take a core between the first races and the last."""

    def assess(self, candidates: Sequence[Candidate], samples: int) -> dict[str, Assessment]:
        self.thread_gain = {0: 3.0}
        return super().assess(candidates, samples)


def test_further_candidates_race_if_no_finalist_is_fast_enough() -> None:
    facts = {name: Fact(speed=1.0, structure=name, bytes=10) for name in "abcd"} | {"e": Fact(speed=2, bytes=50)}
    outcome = run(FakeEvaluator(facts, reach=0.03), *"abcde", goal=Goal("size"))
    assert outcome.chosen == "e"
    assert outcome.trial("a").reason.startswith("no difference in speed from float32 is settled")


def test_far_slower_candidates_skip_the_last_race() -> None:
    facts = {"a": Fact(speed=2), "b": Fact(speed=4), "c": Fact(speed=3.7)}
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, *facts)
    assert evaluator.log[-1] == "race float32, b, c"
    assert outcome.trial("a").reason == "2.00 times the latency of b, in an earlier race"
    assert run(evaluator, *facts, goal=Goal(thorough=True)).chosen == "b"
    assert evaluator.log[-1] == "race float32, b, c, a"


class SharedCore(FakeEvaluator):
    """Make float32 faster in the last races, because its second thread helps only then.

    A candidate that is not raced again then seems faster than it is.
    """

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        judged = any(line.startswith("assess") for line in self.log)
        self.float_ms, kept = (6.0 if judged else 10.0), self.float_ms
        race = super().time(runners, baseline, **how)
        self.float_ms = kept
        return race

    def _p50(self, candidate: Candidate | None, threads: int) -> float:
        return 10.0 / self.fact(candidate.name).speed if candidate else self.float_ms


def test_winners_of_earlier_races_join_the_last_race() -> None:
    facts = {name: Fact(speed=speed, structure=name) for name, speed in zip("abcdef", range(40, 34, -1), strict=True)}
    evaluator = SharedCore(facts)
    outcome = run(evaluator, *facts)
    assert outcome.chosen == "a"
    _, *last = (line for line in evaluator.log if line.startswith("race"))
    assert last == ["race float32, a, b, c, d", "race float32, a, b, c, d, e, f"]
    assert {t.timing.float_ms for t in outcome.trials if t.timing} == {6.0}


def test_threads_are_chosen_first_and_float_gets_its_own_best() -> None:
    evaluator = FakeEvaluator({"a": Fact(speed=2)}, thread_gain={1: 0.5})
    outcome = run(evaluator, "a", threads=(0, 1))
    assert outcome.winner is not None
    assert outcome.winner.candidate.threads == 1
    assert outcome.baseline_threads == 1
    assert outcome.winner.timing is not None
    assert outcome.winner.timing.speedup is not None
    assert outcome.winner.timing.speedup.estimate == pytest.approx(2)


def test_threads_are_chosen_again_before_the_last_race() -> None:
    evaluator = Crowded({"a": Fact(speed=2)}, thread_gain={0: 0.5})
    outcome = run(evaluator, "a", threads=(0, 1))
    assert outcome.winner is not None
    assert (outcome.winner.candidate.threads, outcome.baseline_threads) == (1, 1)
    races = [line for line in evaluator.log if line.startswith("race")]
    assert races[-3:] == ["race float32 0 last, float32 1 last", "race int8 0 last, int8 1 last", "race float32, a"]


def test_speeds_with_other_threads_are_not_held_against_the_last_race() -> None:
    """Speeds with other numbers of threads are not compared with the last race.

    `b` is as fast as `a` but less accurate, and was timed when all threads were fast. It must not win by that figure.
    """

    facts = {"a": Fact(speed=2, structure="s"), "b": Fact(speed=2, structure="s", loss=0.004)}
    outcome = run(Crowded(facts, total=20, thread_gain={0: 0.5}, clock=Clock()), "a", "b", threads=(0, 1))
    assert outcome.chosen == "a"
    assert {t.candidate.threads for t in outcome.trials} == {1}
    assert {t.timing.latency["p50_ms"] for t in outcome.trials if t.timing} == {5.0}


def test_threads_that_are_quick_in_the_median_only_are_not_taken() -> None:
    outcome = run(FakeEvaluator({"a": Fact()}, thread_gain={0: 0.8}, tails={0: 1.5}), "a", threads=(0, 1))
    assert outcome.winner is not None
    assert outcome.winner.candidate.threads == 1


def test_on_a_busy_machine_the_threads_are_left_to_the_device_and_nothing_is_chosen() -> None:
    evaluator = FakeEvaluator({"a": Fact(speed=2)}, thread_gain={1: 0.5}, busy="the machine was busy")
    outcome = run(evaluator, "a", threads=(0, 1))
    assert outcome.winner is None
    assert outcome.baseline_threads == 0
    assert outcome.trial("a").reason == "its speed is not known: the machine was busy"
    assert "⟨resume=True⟩ on a quiet machine measures it again" in " ".join(describe_verdict(outcome, Goal()))


class BusyFor(FakeEvaluator):
    """Keep the machine busy in all races that last less than twenty seconds."""

    def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
        self.log.append(f"for {how['seconds']:g} s")
        self.busy = "the machine was busy" if how["seconds"] < 20 else ""
        return super().time(runners, baseline, **how)


def test_the_last_race_goes_on_while_nothing_can_be_claimed() -> None:
    evaluator = BusyFor({"a": Fact(speed=2)})
    assert run(evaluator, "a").chosen == "a"
    assert [line for line in evaluator.log if line.startswith("for ")][-2:] == ["for 12 s", "for 24 s"]


@pytest.mark.parametrize(("speed", "races"), [(1.5, 2), (3.0, 3)])
def test_the_last_race_goes_on_only_for_one_that_may_be_the_best(speed: float, races: int) -> None:
    evaluator = BusyWith({"a": Fact(speed=2), "b": Fact(speed=speed)})
    evaluator.doubtful = "b"
    assert run(evaluator, "a", "b").chosen == "a"
    assert len([line for line in evaluator.log if line.startswith("race")]) == races


def test_a_busy_machine_is_not_waited_for_when_the_budget_is_used_up() -> None:
    evaluator = BusyFor({"a": Fact(speed=2)}, clock=Clock())
    assert run(evaluator, "a", goal=Goal(budget_s=1)).winner is None
    assert evaluator.log.count("for 0 s") == 2  # in the first race and in the last


def test_the_fewest_of_equally_fast_threads_are_chosen() -> None:
    outcome = run(FakeEvaluator({"a": Fact(speed=2)}), "a", threads=(0, 2, 1))
    assert outcome.winner is not None
    assert outcome.winner.candidate.threads == 1


@pytest.mark.parametrize(("speed", "recovered"), [(0.97, False), (1.2, True)])
def test_untimed_candidates_are_timed_again_before_recoveries(speed: float, recovered: bool) -> None:
    """A candidate that could not be timed is timed again before recoveries, which take minutes, are tried on it."""

    class BusyAtFirst(FakeEvaluator):
        def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
            judged = any(line.startswith("assess") for line in self.log)
            self.busy = "" if judged else "the machine was busy"
            self.facts = {key: replace(fact, speed=speed if judged else 1.1) for key, fact in self.facts.items()}
            return super().time(runners, baseline, **how)

    facts = {"a": Fact(loss=0.05, structure="a"), "a + split": Fact(structure="s")}
    evaluator = BusyAtFirst(facts, costly=("split",))
    outcome = run(evaluator, "a")
    assert outcome.chosen == ("a + split" if recovered else "")
    assert ("build a + split" in evaluator.log) == recovered


@pytest.mark.parametrize(("speed", "recovered"), [(2.1, False), (2.4, True)])
def test_a_lossier_candidate_is_recovered_only_if_clearly_faster(speed: float, recovered: bool) -> None:
    facts = {
        "a": Fact(speed=2, loss=0.05),
        "a + split": Fact(speed=1.8),
        "b": Fact(speed=speed, loss=0.3),
        "b + split": Fact(speed=speed),
    }
    evaluator = FakeEvaluator(facts, costly=("split",))
    outcome = run(evaluator, "a", "b")
    assert outcome.chosen == ("b + split" if recovered else "a + split")
    assert ("build b + split" in evaluator.log) == recovered


@pytest.mark.parametrize(("objective", "recovered"), [("latency", False), ("size", True)])
def test_slower_candidates_are_recovered_only_for_size(objective: Literal["latency", "size"], recovered: bool) -> None:
    facts = {"a": Fact(speed=0.995, loss=0.05), "a + split": Fact(speed=0.995)}
    evaluator = FakeEvaluator(facts, costly=("split",))
    run(evaluator, "a", goal=Goal(objective=objective))
    assert ("build a + split" in evaluator.log) == recovered


@pytest.mark.parametrize(("first", "tried"), [(1.9, False), (1.2, True)])
def test_dynamic_candidates_are_recovered_if_static_ones_became_slow(first: float, tried: bool) -> None:
    facts = {
        "a": Fact(speed=2, loss=0.02),
        "a, 1 layers in float": Fact(speed=first),
        "dynamic": Fact(speed=2, loss=0.03, structure="dynamic"),
        "dynamic, 1 layers in float": Fact(speed=1.8, loss=0.001),
    }
    evaluator = FakeEvaluator(facts, ranked=("n1", "n2", "n3"))
    kinds = [Candidate("a", Scheme()), Candidate("dynamic", Scheme(mode="dynamic"))]
    outcome = search(kinds, profile(), evaluator, Goal(), BudgetClock(None, Clock()))
    assert ("dynamic, 1 layers in float" in [t.name for t in outcome.trials]) == tried
    assert outcome.chosen.startswith("dynamic") == tried


@pytest.mark.parametrize(("speed", "chosen"), [(2.2, "c + split"), (2.0, "")])
def test_the_least_lossy_of_equally_fast_candidates_is_recovered(speed: float, chosen: str) -> None:
    facts = {
        "a": Fact(speed=2.3, loss=0.3),
        "b": Fact(speed=2.25, loss=0.2),
        "c": Fact(speed=speed, loss=0.02),
        "c + split": Fact(speed=speed),
    }
    assert run(FakeEvaluator(facts, costly=("split",)), "a", "b", "c").chosen == chosen


@pytest.mark.parametrize(("loss", "chosen"), [(0.002, "b + recovery"), (0.03, "")])
def test_each_kernel_choice_is_repaired_from_the_start(loss: float, chosen: str) -> None:
    facts = {
        "a": Fact(loss=0.05, structure="s"),
        "a + recovery": Fact(loss=0.02, structure="s"),
        "b": Fact(loss=0.06, structure="s"),
        "b + recovery": Fact(loss=loss, structure="s"),
    }
    outcome = run(FakeEvaluator(facts, methods=("x", "y")), "a", "b")
    assert outcome.chosen == chosen
    assert outcome.trial("b + recovery").candidate.recoveries == ("x", "y")


def test_all_recoveries_at_once_first() -> None:
    facts = {"a": Fact(loss=0.05), "a + recovery": Fact(loss=0.002)}
    outcome = run(FakeEvaluator(facts, methods=("x", "y")), "a")
    assert outcome.chosen == "a + recovery"
    assert outcome.winner is not None
    assert outcome.winner.candidate.recoveries == ("x", "y")
    assert outcome.winner.parent == "a"
    assert [t.name for t in outcome.trials] == ["a", "a + recovery"]


@pytest.mark.parametrize(("speed", "named"), [(1.6, "a + recovery"), (0.9, "a")])
def test_the_least_lossy_miss_is_timed_and_named_if_faster(speed: float, named: str) -> None:
    facts = {"a": Fact(loss=0.2), "a + recovery": Fact(speed=speed, loss=0.012, width=0.004)}
    evaluator = FakeEvaluator(facts, methods=("x",))
    outcome = run(evaluator, "a")
    assert not outcome.chosen
    assert evaluator.log.count("race float32, a + recovery") == 1
    assert describe_verdict(outcome, Goal())[1].startswith(f"{named} is faster than float32 and loses")


def test_recoveries_that_cost_speed_come_after_those_that_do_not_and_before_layers_in_float() -> None:
    facts = {
        "a": Fact(loss=0.05),
        "a + recovery": Fact(loss=0.03),
        "a + recovery + split + head": Fact(loss=0.002, speed=1.8),
    }
    evaluator = FakeEvaluator(facts, methods=("x", "y"), costly=("split", "head"), ranked=("n", "m"))
    outcome = run(evaluator, "a")
    assert outcome.chosen == "a + recovery + split + head"
    assert outcome.winner is not None
    assert outcome.winner.candidate.recoveries == ("x", "y", "split", "head")
    assert not any(t.stage == "exclusion" for t in outcome.trials)


def test_layers_go_to_float_last() -> None:
    facts = {
        "a": Fact(loss=0.05),
        "a + recovery": Fact(loss=0.02),
        "a + recovery, 1 layers in float": Fact(loss=0.015, speed=1.9),
        "a + recovery, 2 layers in float": Fact(loss=0.005, speed=1.8),
    }
    evaluator = FakeEvaluator(facts, methods=("x",), ranked=("n1", "n2", "n3", "n4"))
    outcome = run(evaluator, "a")
    assert outcome.chosen == "a + recovery, 2 layers in float"
    assert outcome.winner is not None
    assert outcome.winner.candidate.scheme.exclude == ("n1", "n2")
    assert outcome.trial("a + recovery, 1 layers in float").stage == "exclusion"
    assert "a + recovery, 1 layers in float, choice 2" in [t.name for t in outcome.trials], "n1 is put back"
    assert "a + recovery, 4 layers in float" not in [t.name for t in outcome.trials]


@pytest.mark.parametrize(("speed", "most"), [(1.02, 0), (1.05, 4), (2.0, 7)])
def test_layers_go_to_float_no_further_than_a_race_can_tell_from_float32(speed: float, most: int) -> None:
    facts = {"a": Fact(speed=speed, loss=0.02)}
    evaluator = FakeEvaluator(facts, ranked=tuple(f"n{i}" for i in range(8)), reach=0.001)
    outcome = run(evaluator, "a")
    tried = [len(t.candidate.scheme.exclude) for t in outcome.trials if t.stage == "exclusion"]
    assert max(tried, default=0) == most


def test_no_recovery_where_the_fastest_qualifies() -> None:
    facts = {"a": Fact(speed=3), "b": Fact(speed=2, loss=0.02)}
    evaluator = FakeEvaluator(facts, costly=("split",))
    assert run(evaluator, "a", "b").chosen == "a"
    assert not [line for line in evaluator.log if "+ split" in line]


def test_something_faster_that_falls_short_is_recovered_although_another_qualifies() -> None:
    facts = {"a": Fact(speed=3, loss=0.03), "a + recovery": Fact(speed=3, loss=0.001), "b": Fact(speed=1.5)}
    assert run(FakeEvaluator(facts, methods=("x",)), "a", "b").chosen == "a + recovery"


def test_halving_keeps_the_better_half_of_one_speed_and_measures_the_last_in_full() -> None:
    facts = {f"m{i}": Fact(structure="s", loss=i / 1000) for i in range(8)}
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, *facts)
    assert outcome.chosen == "m0"
    assert [sum(line.endswith(f" {n}") for line in evaluator.log) for n in (50, 100, 200, 400)] == [8, 4, 2, 1]
    assert "loses up to 0.70 points, not 0.00 points" in outcome.trial("m7").reason


def test_an_early_surprise_does_not_decide() -> None:
    """A candidate with a bad figure on few samples is measured further, because its interval is wide."""
    facts = {"a": Fact(loss=0.005, early=0.02, width=0.02), "b": Fact(speed=1.5)}
    assert run(FakeEvaluator(facts), "a", "b").chosen == "a"


def test_the_pareto_front_holds_what_no_other_beats() -> None:
    facts = {"a": Fact(speed=2, loss=0.001), "b": Fact(speed=3, loss=0.008), "c": Fact(speed=1.5, loss=0.005)}
    outcome = run(FakeEvaluator(facts), "a", "b", "c")
    assert [t.name for t in outcome.trials if t.pareto] == ["a", "b"]


def test_a_budget_that_runs_out_early_still_gives_an_answer() -> None:
    clock = Clock()
    facts = {f"m{i}": Fact(speed=2 + i, loss=0.001 * i) for i in range(30)}
    evaluator = FakeEvaluator(facts, clock=clock)
    outcome = run(evaluator, *facts, goal=Goal(budget_s=20))
    assert outcome.chosen
    assert clock.now < 30
    assert "the budget ran out before it was built" in {t.reason for t in outcome.trials}


def test_every_candidate_has_a_reason_and_the_stages_are_on_record() -> None:
    facts = {"a": Fact(loss=0.05), "b": Fact(speed=3), "c": Fact(speed=0.5), "d": Fact(error="broken")}
    outcome = run(FakeEvaluator(facts, methods=("x",)), *facts)
    assert all(t.reason for t in outcome.trials)
    assert [s.name for s in outcome.stages] == ["building", "timing", "methods", "accuracy", "recovery", "last race"]


def test_nothing_to_try_is_an_outcome() -> None:
    outcome = run(FakeEvaluator({}))
    assert outcome.winner is None
    assert outcome.baseline is None


def test_once_one_is_recovered_another_of_its_speed_is_left_alone() -> None:
    facts = {
        "a": Fact(speed=3, loss=0.02),
        "a + split": Fact(speed=3, loss=0.001),
        "b": Fact(speed=3.01, loss=0.5),
    }
    evaluator = FakeEvaluator(facts, costly=("split",))
    assert run(evaluator, "a", "b").chosen == "a + split"
    assert not [line for line in evaluator.log if line.startswith("build b + split")]


def test_a_kernel_choice_that_is_no_faster_and_far_less_exact_gets_no_methods() -> None:
    facts = {
        "a": Fact(speed=2, sqnr_db=30),
        "b": Fact(speed=2.005, sqnr_db=5),
        "c": Fact(speed=3, sqnr_db=5, loss=0.5),
    }
    evaluator = FakeEvaluator(facts)
    outcome = run(evaluator, "a", "b", "c")
    assert "no better than a in latency, and its outputs' SQNR is 25 dB lower" in outcome.trial("b").reason
    assert not [line for line in evaluator.log if line.startswith("assess b")]
    assert [line for line in evaluator.log if line.startswith("assess c")]


def test_an_unclaimed_median_does_not_decide() -> None:
    """A median from a race without a claim decides nothing: "exact" has the better one, but is not faster later."""

    class QuietLater(FakeEvaluator):
        def time(self, runners: Mapping[str, Runner], baseline: str, **how: Any) -> Race:
            judged = any(line.startswith("assess") for line in self.log)
            self.busy = "" if judged else "the runs disagree"
            self.facts["exact"] = Fact(speed=0.97 if judged else 2.1, sqnr_db=130)
            return super().time(runners, baseline, **how)

    outcome = run(QuietLater({"exact": Fact(sqnr_db=130), "int8": Fact(speed=2, sqnr_db=30)}), "exact", "int8")
    assert outcome.chosen == "int8"
    assert outcome.trial("exact").reason.startswith("slower than float32: 0.97 times its speed")


def test_without_a_clock_the_most_int8_that_keeps_its_accuracy_wins_and_nothing_is_timed() -> None:
    facts = {
        "a": Fact(share=0.8, structure="a"),
        "b": Fact(share=0.9, loss=0.004, structure="b"),
        "c": Fact(share=0.99, loss=0.2, structure="c"),
    }
    evaluator = FakeEvaluator(facts, timed=False)
    outcome = run(evaluator, "a", "b", "c", threads=(0, 1))
    assert outcome.chosen == "b"
    assert "the one with the most MACs in int8" in outcome.trial("b").reason
    assert outcome.trial("a").reason == "20.0% of the MACs in float, b 10.0%"
    assert not [line for line in evaluator.log if line.startswith("race")]
    assert all(t.reason for t in outcome.trials)


def test_without_a_clock_layers_go_to_float_as_far_as_that_may_win() -> None:
    facts = {
        "a": Fact(share=1.0, loss=0.05, structure="0"),
        "a, 1 layers in float": Fact(share=0.75, loss=0.03, structure="1"),
        "a, 2 layers in float": Fact(share=0.5, loss=0.002, structure="2"),
        "b": Fact(share=0.4, loss=0.001, structure="b"),
    }
    evaluator = FakeEvaluator(facts, timed=False, ranked=("n1", "n2", "n3", "n4"))
    assert run(evaluator, "a", "b").chosen == "a, 2 layers in float"
    rival = {**facts, "b": Fact(share=0.7, loss=0.001, structure="b")}
    outcome = run(FakeEvaluator(rival, timed=False, ranked=("n1", "n2", "n3", "n4")), "a", "b")
    assert outcome.chosen == "b"
    assert "a, 2 layers in float" not in [t.name for t in outcome.trials], "it could not win"
