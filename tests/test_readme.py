"""Test that the commands, scripts and links of the README exist."""

from __future__ import annotations

import re
from pathlib import Path

from edgeq.cli import COMMANDS

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL)


def test_the_two_commands_come_first() -> None:
    assert [line.split()[0] for line in BLOCKS[0].splitlines()] == ["scripts/quickstart", "scripts/test"]


def test_commands_exist() -> None:
    shown = set(re.findall(r"^(?:\$ )?edgeq ([a-z]+)", "\n".join(BLOCKS), re.MULTILINE))
    assert shown
    assert shown <= set(COMMANDS)


def test_files_exist() -> None:
    named = set(re.findall(r"\]\(([^)#:]+)\)", README))
    named |= set(re.findall(r"`((?:scripts|docs|edgeq|profiles|targets)/[\w./]*)`", README))
    assert named
    assert [n for n in sorted(named) if not (REPOSITORY / n).exists()] == []


def test_the_front_pages_show_figures_of_the_results_page() -> None:
    """Each row of the tables of results has the figures of a row in docs/results.md."""
    results = [set(line.split()) for line in (REPOSITORY / "docs" / "results.md").read_text("utf-8").splitlines()]
    for page in (REPOSITORY / "README.md", REPOSITORY / "docs" / "index.md"):
        rows = re.findall(r"^\|(?: [^|]* \|)* \d\.\d\d \|$", page.read_text("utf-8"), re.MULTILINE)
        assert rows
        for row in rows:
            figures = set(re.findall(r"(?<= )\d+\.\d\d(?=,? )", row.partition("|")[2].partition("|")[2]))
            assert any(figures <= words for words in results), row
