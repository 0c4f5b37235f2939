"""What the printer does with text that is not its own."""

from __future__ import annotations

import pytest
from rich.table import Table

from edgeq.cli._common import Printer


def test_names_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's names reach the terminal in lines and in tables; `[red]` would be taken for markup and left out."""
    name = "[red]layer[/red]"
    table = Table("tensor", title=name)
    table.add_row(name)
    printer = Printer(as_json=False, quiet=False, verbose=False)
    printer.result({}, lambda console: console.print(table))
    printer.lines({}, [name])
    assert capsys.readouterr().out.count(name) == 3
