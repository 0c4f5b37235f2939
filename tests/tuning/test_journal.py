"""Test the journal: a measurement is not repeated, and nothing else is read from the journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeq.errors import OutputError
from edgeq.scheme import Scheme
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.goal import Goal
from edgeq.tuning.journal import Journal, JournaledEvaluator, digest
from edgeq.tuning.search import search
from edgeq.tuning.space import Candidate
from edgeq.tuning.trials import Outcome
from edgeq.util.records import plain
from tests.tuning.fakes import Clock, Fact, FakeEvaluator, Interrupted, profile

SETTINGS = {"model": "m", "validation_data": "d"}
FACTS = {
    "a": Fact(speed=3, loss=0.05),
    "a + recovery": Fact(speed=3, loss=0.004),
    "b": Fact(speed=2, sqnr_db=float("inf")),
    "c": Fact(error="no kernel"),
}


def journaled(evaluator: Any, path: Path, *, resume: bool = False) -> tuple[Outcome, Journal]:
    journal = Journal(path, SETTINGS, resume=resume)
    deadline = BudgetClock(None, Clock())
    candidates = [Candidate(name, Scheme()) for name in ("a", "b", "c")]
    return search(candidates, profile(), JournaledEvaluator(evaluator, journal), Goal(), deadline), journal


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    first = FakeEvaluator(FACTS, methods=("x",))
    counted = Interrupted(first, 1000)
    whole, _ = journaled(counted, tmp_path / "whole.jsonl")
    for after in range(1, 1000 - counted.after):
        path = tmp_path / f"{after}.jsonl"
        with pytest.raises(KeyboardInterrupt):
            journaled(Interrupted(FakeEvaluator(FACTS, methods=("x",)), after), path)
        second = FakeEvaluator(FACTS, methods=("x",))
        resumed, _ = journaled(second, path, resume=True)
        assert plain(resumed) == plain(whole)
        assert len(second.log) < len(first.log)


def test_a_finished_journal_leaves_nothing_to_do(tmp_path: Path) -> None:
    journaled(FakeEvaluator(FACTS, methods=("x",)), tmp_path / "j.jsonl")
    again = FakeEvaluator(FACTS, methods=("x",))
    _, journal = journaled(again, tmp_path / "j.jsonl", resume=True)
    assert again.log == []
    assert journal.count > 5


def test_a_journal_of_other_data_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", SETTINGS, resume=False)
    journal.remember("k", lambda: 1)
    with pytest.raises(OutputError, match="another validation data"):
        Journal(tmp_path / "j.jsonl", {**SETTINGS, "validation_data": "other"}, resume=True)


def test_a_journal_that_is_there_is_not_overwritten_in_silence(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl", SETTINGS, resume=False).remember("k", lambda: 1)
    with pytest.raises(OutputError, match="resume"):
        Journal(tmp_path / "j.jsonl", SETTINGS, resume=False)
    anew = Journal(tmp_path / "j.jsonl", SETTINGS, resume=False, force=True)
    assert anew.remember("k", lambda: 2) == 2


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    journal.remember("k", lambda: 1)
    journal.remember("l", lambda: 2)
    path.write_text(path.read_text()[:-5])
    resumed = Journal(path, SETTINGS, resume=True)
    assert resumed.remember("k", lambda: 7) == 1
    assert resumed.remember("l", lambda: 7) == 7
    assert [json.loads(line) for line in path.read_text().splitlines()][-1] == {"key": "l", "value": 7}


HEAD = '{"format": "edgeq-tuning-journal/2", "settings": {"model": "m", "validation_data": "d"}}\n'


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\n",
        "nonsense",
        "[]\n",
        '{"format": "other", "settings": {}}\n',
        "null\n",
        '{"format": "edgeq-tuning-journal/9", "settings": {}}\n',
        '{"format": "edgeq-tuning-journal/2", "settings": []}\n',
        '{"format": "edgeq-tuning-journal/2"}\n',
        HEAD + '{"key": "k\udcff", "value": 1}\n',
        HEAD + '{"key": 1, "value": 1}\n',
        HEAD + '{"value": 1}\n',
        HEAD + "[" * 100_000 + "\n",
        HEAD + '{"key": "k", "value": ' + "9" * 5000 + "}\n",
        HEAD + '{"key": "k", "value": NaN}\n',
    ],
)
def test_refuses_files_that_are_not_journals(tmp_path: Path, text: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(content := text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OutputError, match="not a journal") as caught:
        Journal(path, SETTINGS, resume=True)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_every_beginning_of_a_journal_is_gone_on_from(tmp_path: Path) -> None:
    """A search can resume from any beginning of a journal: a kill may cut it off anywhere, even in the header."""
    path = tmp_path / "j.jsonl"
    whole = Journal(path, SETTINGS, resume=False)
    for key in ("k", "l"):
        whole.remember(key, lambda: [1.5, "ä"])
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        resumed = Journal(path, SETTINGS, resume=True)
        for key in ("k", "l"):
            assert resumed.remember(key, lambda: [1.5, "ä"]) == [1.5, "ä"]
        assert path.read_bytes() == content


@pytest.mark.parametrize("value", [None, "x", {}, [[]], {"found": 1}, {"found": {"bytes": "many"}}, {"error": 5}])
def test_a_value_of_another_form_is_refused(tmp_path: Path, value: Any) -> None:
    candidate = Candidate("a", Scheme())
    name = digest(candidate)
    uses: dict[str, Callable[[JournaledEvaluator], Any]] = {
        f"screen {name}": lambda measured: measured.build(candidate),
        f"assess 8 {name}": lambda measured: measured.assess([candidate], 8),
        f"memory 1 {name}": lambda measured: measured.memory(candidate, 1),
        f"slow layers 0 1 {name}": lambda measured: measured.slow_layers(candidate, 1),
    }
    for number, (key, use) in enumerate(uses.items()):
        journal = Journal(tmp_path / f"{number}.jsonl", SETTINGS, resume=True)
        journal.remember(key, lambda: value)
        with pytest.raises(OutputError) as caught:
            use(JournaledEvaluator(FakeEvaluator({"a": Fact(speed=2)}), journal))
        assert str(tmp_path / f"{number}.jsonl") in caught.value.problem


def test_resuming_without_a_journal_starts_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "j.jsonl", SETTINGS, resume=True)
    assert journal.remember("k", lambda: [1.5, None]) == [1.5, None]
    assert (tmp_path / "deep" / "j.jsonl").exists()


@pytest.mark.parametrize("text", ["mine\n", '{"format": "other"}\n', "[]"])
def test_keeps_files_that_are_not_journals(tmp_path: Path, text: str) -> None:
    (tmp_path / "j.jsonl").write_text(text)
    with pytest.raises(OutputError, match=r"j\.jsonl is not a journal of edgeq's"):
        Journal(tmp_path / "j.jsonl", SETTINGS, resume=False, force=True)
    assert (tmp_path / "j.jsonl").read_text() == text


def test_the_threads_are_measured_again_before_the_last_race(tmp_path: Path) -> None:
    """Threads are measured again before the last race: the journal must not return the first measurement."""
    evaluator = FakeEvaluator({"a": Fact(speed=2)}, total=20_000, clock=Clock())
    journal = Journal(tmp_path / "journal.jsonl", {}, resume=False)
    measured = JournaledEvaluator(evaluator, journal)
    search([Candidate("a", Scheme())], profile(), measured, Goal(), BudgetClock(None, evaluator.clock), threads=(0, 1))
    assert len([line for line in evaluator.log if line.startswith("race float32 0")]) == 2


def test_a_race_on_a_busy_machine_is_run_again(tmp_path: Path) -> None:
    """A race on a busy machine is run again, because it has no result."""
    runners = {"float32": (None, 0), "a": (Candidate("a", Scheme()), 0)}
    for busy, races in (("the machine was busy", 1), ("", 1), ("", 0)):
        evaluator = FakeEvaluator({"a": Fact(speed=2)}, busy=busy)
        journal = Journal(tmp_path / "journal.jsonl", {}, resume=True)
        race = JournaledEvaluator(evaluator, journal).time(runners, "float32", tie=0.01, seconds=1, rough=False)
        assert race.timings["a"].speedup is not None
        assert race.timings["a"].speedup.reason == busy
        assert len(evaluator.log) == races
