"""What every command shares: options, output for people or as JSON, and errors as one line and an exit code."""

from __future__ import annotations

import errno
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from edgeq_device.budget import Budget, renew
from edgeq_device.relay import json_text, printable, printable_lines, unfiltered

from edgeq.cli._next import next_line
from edgeq.errors import OutputError
from edgeq.util.display import SILENT, Advance, Progress
from edgeq.util.process import check_threads, ends_in_one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

F = TypeVar("F", bound=Callable[..., Any])
Lines = Iterable[Any]
"""What a command prints for people: texts, each on a line of its own, tables, and texts with a style."""


@dataclass(frozen=True)
class Printer:
    """Where output goes: the result on stdout, as JSON or for people; progress and notes on stderr.

    Attributes:
        budget: what the process may take, if it runs under limits; each step of progress renews it.
    """

    as_json: bool
    quiet: bool
    verbose: bool
    budget: Budget | None = None

    def result(self, record: Any, human: Callable[[], None]) -> None:
        """Print a command's result: `record` (see `edgeq.util.records`) as JSON with --json, else what `human`
        prints."""
        from edgeq.util.records import plain

        try:
            if self.as_json:
                click.echo(json_text(plain(record)))
            else:
                human()
            sys.stdout.flush()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise OutputError(f"standard output cannot be written: {error.strerror}", "Send it elsewhere") from error

    def lines(self, record: Any, lines: Lines) -> None:
        """Print a command's result as `result` does; `lines` are not made where nobody reads them."""

        def draw() -> None:
            console = self.console()
            for line in lines:
                console.print(line)

        self.result(record, draw)

    def console(self) -> Console:
        """A rich console on stdout that raises on a broken pipe; lines are not wrapped where stdout is no terminal.

        Each text, in a line or in a cell of a table, stays on its line and moves no cursor.
        """
        from rich.console import Console

        class Piped(Console):
            def on_broken_pipe(self) -> None:
                raise  # rich calls this while it handles the error, and would end the program itself

            def render_str(self, text: str, **options: Any) -> Text:  # all that is no Text yet comes through here
                return super().render_str(printable(text), **options)

        return Piped(
            file=unfiltered(sys.stdout), soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False, emoji=False
        )

    def progress(self) -> Progress:
        """A progress display on stderr when a person is watching; notes alone otherwise; nothing with --quiet."""
        shown = SILENT if self.quiet else _StderrProgress()
        return shown if self.budget is None else _Renewing(shown, self.budget)


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]], *, numbers_from: int | None = None, **how: Any) -> Table:
    """A table for people.

    Args:
        numbers_from: the column from which on all are aligned to the right.
        how: as rich's tables take it.
    """
    from rich.table import Column, Table

    first = numbers_from if numbers_from is not None else sys.maxsize
    made = Table(*(Column(head, justify="right" if i >= first else "left") for i, head in enumerate(heads)), **how)
    for row in rows:
        made.add_row(*row)
    return made


def watched_console() -> Console:
    """Return a rich console on stderr for what is drawn again and again; what is printed above it stays plain."""
    from rich.console import Console
    from rich.text import Text

    class Watched(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            plain = (Text(printable_lines(one.plain)) if isinstance(one, Text) else one for one in objects)
            super().print(*plain, **options)

    return Watched(file=unfiltered(sys.stderr))


def styled(text: str, style: str) -> Text:
    """A line in a colour, or bold."""
    from rich.text import Text

    return Text(printable(text), style=style)


@dataclass(frozen=True)
class _Renewing:
    """Progress of which each step gives the process its time again."""

    shown: Progress
    budget: Budget

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """See `Progress.stage`."""
        with self.shown.stage(title, total) as advance:
            renew(self.budget)

            def renewing(steps: int) -> None:
                renew(self.budget)
                advance(steps)

            yield renewing
        renew(self.budget)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.shown.note(text)


class _StderrProgress:
    def __init__(self) -> None:
        self._printed: set[str] = set()

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """See `Progress.stage`: a bar with speed and remaining time on a terminal, else nothing."""
        if not sys.stderr.isatty():
            yield lambda steps: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        class Speed(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(f"{task.speed:.1f}/s" if task.speed else "")

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=watched_console(), transient=True) as bar:
            task = bar.add_task(printable(title), total=total)
            yield lambda steps: bar.advance(task, steps)

    def note(self, text: str) -> None:
        """Print `text` on stderr once: notes on calibration and validation data are often the same."""
        if text not in self._printed:
            self._printed.add(text)
            click.echo(printable(text), err=True)


def common(function: F) -> F:
    """Add --json, -q, -v (passed as `printer`) and --print-recipe to a command, and end on errors with one line and an
    exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress and no notes.")
    @click.option("-v", "--verbose", is_flag=True, help="Give reasons.")
    @click.option("--print-recipe", is_flag=True, help="Print the recipe for `edgeq run` that does the same.")
    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, verbose: bool, print_recipe: bool, **kwargs: Any) -> None:
        # onnxruntime's quantizer warns of what edgeq has done already.
        logging.getLogger().setLevel(logging.ERROR)
        with ends_in_one_line(verbose=verbose):
            if print_recipe:
                from edgeq.cli._recipe import written

                click.echo(written(click.get_current_context()))
                return
            check_threads()
            budget = click.get_current_context().find_object(Budget)
            function(*args, printer=Printer(as_json, quiet, verbose, budget), **kwargs)
            if not as_json and not quiet and (line := next_line(click.get_current_context())) is not None:
                click.echo(printable(f"next: {line}"))

    return wrapped  # type: ignore[return-value]
