"""Test how the printer shows text from outside."""

from __future__ import annotations

import pytest
from rich.table import Table

from edgeq.cli._common import Printer


def test_names_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's names are printed as they are, in lines and in tables. As markup, `[red]` would disappear."""
    name = "[red]layer[/red]"
    table = Table("tensor", title=name)
    table.add_row(name)
    printer = Printer(as_json=False, quiet=False, verbose=False)
    printer.lines({}, [table])
    printer.lines({}, [name])
    assert capsys.readouterr().out.count(name) == 3


def test_names_stay_on_their_line_and_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    name, shown = "a:smile:\x1b[2J\nb\x9b1A\u202e", "a:smile:\\x1b[2J\\nb\\x9b1A\\u202e"
    table = Table(name, title=name, caption=name)
    table.add_row(name)
    printer = Printer(as_json=False, quiet=False, verbose=False)
    printer.lines({}, [table])
    printer.lines({}, [name])
    printer.progress().note(name)
    printed = capsys.readouterr()
    assert printed.out.count(shown) == 5
    assert printed.err == f"{shown}\n"
    assert printed.out.replace("\n", "").isprintable()
    Printer(as_json=True, quiet=False, verbose=False).lines({"name": name + "\x7f"}, [])
    printed = capsys.readouterr()
    assert printed.out.replace("\n", "").isprintable()
