"""Print what the older tools' commands return, and their notes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from edgeq_device.system.relay import escape

from edgeq.arguments import as_options
from edgeq.util.display import Advance


class PrintedProgress:
    """Print a command's notes on stderr and print no progress, because users redirect the output of these commands."""

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Print nothing about the steps of a stage."""
        del title, total
        yield lambda steps: None

    def note(self, text: str) -> None:
        """Print a note as a line on stderr."""
        # stdout is the result of the command, which scripts read.
        click.echo(escape(as_options(text)), err=True)


def say(*lines: str) -> None:
    """Print texts of one or more lines. Escape the control characters in them, because names may be untrusted."""
    for line in lines:
        click.echo("\n".join(map(escape, as_options(line).split("\n"))))


def says(run: Callable[..., Iterable[str]]) -> Callable[..., None]:
    """Return a function that calls `run` and prints the lines that it returns."""

    @functools.wraps(run)
    def saying(**options: Any) -> None:
        say(*run(**options))

    return saying
