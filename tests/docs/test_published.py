"""Check the page of published figures and the files that it is made from."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module benchmarks/published.py."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("published")


def test_the_page_is_that_of_the_files(script: Any) -> None:
    assert script.PAGE.read_text("utf-8") == script.page(), "run python benchmarks/published.py"


def test_each_figure_has_a_source_and_belongs_to_a_case(script: Any) -> None:
    rows = script.published()
    assert len(rows) >= 20
    assert {row.case for row in rows} == set(script.cases()), "a case without a figure, or a figure without a case"
    for row in rows:
        assert re.match(r"https://\S+/\S+$", row.url), row
        assert row.source, row
        assert row.differs, row
        assert 0 < row.int8 <= 100, row


def test_each_case_is_measured_by_its_command(script: Any) -> None:
    cases = script.cases()
    measured = script.measured()
    assert {(row.case, row.target) for row in measured} == {(n, t) for n, case in cases.items() for t in case.targets}
    for row in measured:
        assert row.command == cases[row.case].command(row.target)
        low, high = row.interval
        assert low <= row.float32 - row.int8 <= high, row
