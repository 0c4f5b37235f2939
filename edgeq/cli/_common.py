"""Provide the output functions that commands share. They print a result as text or JSON, and report an error as one
line with an exit code.
"""

from __future__ import annotations

import errno
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from edgeq_device.system.budget import Budget, renew
from edgeq_device.system.relay import bypass_filter, escape, format_json, hide_passwords

from edgeq.arguments import as_options
from edgeq.cli._next import next_line
from edgeq.cli._recipe import recipe_text
from edgeq.errors import EdgeqError, OutputError
from edgeq.util.display import Progress
from edgeq.util.process import check_threads, endings, ends_in_one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_UNBOUND = 10_000
"""Width in columns if the output does not go to a terminal. It is so large that tables are as wide as their content."""

Lines = Iterable[Any]
"""Lines that a command prints for people. A line is plain text, a table, or text with a style."""


@dataclass(frozen=True)
class Printer:
    """Print the result on stdout, as text or JSON, and print progress and notes on stderr.

    Attributes:
        budget: the memory and time limits of the process, or None. Each progress step renews them.
        writes: whether the command writes a file or folder. With --quiet, a command that writes prints nothing.
    """

    as_json: bool
    quiet: bool
    verbose: bool
    budget: Budget | None = None
    writes: bool = False

    def result(self, record: Any, human: Callable[[], None]) -> None:
        """Print a command's result. With --json, print `record` as JSON (see `edgeq.util.records`). Otherwise call
        `human`, which prints the result as text.
        """
        from edgeq.util.records import plain

        try:
            if self.as_json:
                # numbers that are formatted for people contain narrow spaces
                click.echo(format_json(plain(record)).replace("\\u202f", " "))
                if (context := click.get_current_context(silent=True)) is not None:
                    context.meta[_PRINTED] = True
            elif not (self.quiet and self.writes):
                human()
            sys.stdout.flush()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise OutputError(f"standard output cannot be written: {error.strerror}", "Send it elsewhere") from error

    def lines(self, record: Any, lines: Lines) -> None:
        """Print a command's result as `result` does, with `lines` as the text. `lines` is iterated only if the text is
        printed.
        """

        def draw() -> None:
            console = self.console()
            for line in lines:
                console.print(line)

        self.result(record, draw)

    def console(self) -> Console:
        """Return a rich console on stdout that raises an error if stdout is a broken pipe. If stdout is not a terminal,
        it wraps no lines.

        In lines and in table cells, line breaks and characters that move the cursor are escaped.
        """
        from rich.console import Console

        class Piped(Console):
            def on_broken_pipe(self) -> None:
                raise  # rich calls this in its error handler, and would otherwise end the program itself

            def render_str(self, text: str, **options: Any) -> Text:  # every plain string passes through this function
                return super().render_str(_printable(text), **options)

        watched = sys.stdout.isatty()
        width = None if watched else _UNBOUND
        output = bypass_filter(sys.stdout)
        return Piped(file=output, width=width, soft_wrap=not watched, highlight=False, markup=False, emoji=False)

    def progress(self) -> Progress:
        """Return a display on stderr: bars on a terminal, otherwise only notes. With --quiet it shows nothing."""
        from edgeq.util.progress import StderrProgress

        return StderrProgress(as_options, self._renew, quiet=self.quiet)

    def _renew(self) -> None:
        endings.step()
        if self.budget is not None:
            renew(self.budget)


def table(
    heads: Iterable[str], rows: Iterable[Iterable[Any]], *, numbers_from: int | None = None, **options: Any
) -> Table:
    """Make a table of text.

    Args:
        numbers_from: index of the first right-aligned column. All later columns are right-aligned too.
        options: options of `rich.table.Table`.
    """
    from rich.table import Column, Table

    right_from = numbers_from if numbers_from is not None else sys.maxsize
    grid = Table(
        *(Column(head, justify="right" if i >= right_from else "left") for i, head in enumerate(heads)), **options
    )
    for row in rows:
        grid.add_row(*row)
    return grid


def styled(text: str, style: str) -> Text:
    """Return a line in a rich style, such as a colour or bold."""
    from rich.text import Text

    return Text(_printable(text), style=style)


def _printable(text: str) -> str:
    """Make `text` escape: its arguments become options, and the narrow space between a number and its unit a plain
    space.
    """
    return escape(as_options(text)).replace("\u202f", " ")


_PRINTED = "edgeq.printed"
_TOPICS = {
    "Data": "data val source statistics preprocess try_preprocess count start first stride labels classes task "
    "annotations decoder class_offset confidence iou task_output fixed shapes batch seed skip every_element",
    "Quantization": "method percentile method_options per_channel reduce_range fit_pairs format activation_type "
    "weight_type activation_symmetric rest dynamic weight_only eight_bit block_compute op_types exclude wide recover",
    "Machine": "target targets engine engines variant threads session_options optimization on pin workers no_emulate",
    "Limits": "max_drop effort as_is min_sqnr min_speedup max_growth max_memory_growth require_coverage limits "
    "objective budget duration_s min_queries target_qps latency_bound_ms no_timing thorough memory",
    "Output": "output with_float selftest split force update as_markdown junit as_json quiet verbose print_recipe",
}
"""Title → names of the parameters that the help shows under this title. The help shows all other parameters first,
under Options.
"""
# The help of a command with more options groups them by topic.
_FEW = 14


_MEANT = {
    "calib": "--data",
    "calib-data": "--data",
    "calibration-data": "--data",
    "dataset": "--data",
    "images": "--data",
    "input": "--data",
    "validation": "--val",
    "val-data": "--val",
    "out": "--output",
    "preprocessing": "--preprocess",
    "metric": "--task",
    "device": "--target",
    "time": "--budget",
    "overwrite": "--force",
}
"""Name of an option in another tool → name of the same option in edgeq."""


class GroupedCommand(click.Command):
    """Define a command. If it has many options, its help groups them by topic.

    Attributes:
        installs: function that takes the command's parameters and returns what the command would download and install.
            `edgeq run` asks the user for permission. "" means nothing.
    """

    installs: Callable[[Mapping[str, Any]], str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`. If the user typed another tool's option, the error names edgeq's option."""
        as_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            wrong: click.UsageError = error
            typed = error.option_name if isinstance(error, click.NoSuchOption) else ""
            suggestion = _MEANT.get(typed.lstrip("-"))
            if suggestion is not None and any(suggestion in param.opts for param in self.params):
                wrong = click.UsageError(f"No such option {typed!r}. Did you mean {suggestion!r}?", ctx)
            if as_json:
                _show_error("UsageError", wrong.format_message(), f"See `{ctx.command_path} --help`", wrong.exit_code)
            raise wrong from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by topic."""
        topics = {name: title for title, names in _TOPICS.items() for name in names.split()}
        rows_by_topic: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *_TOPICS)}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for option in options:
            topic = "Output" if option is self.get_help_option(ctx) else topics.get(option.name or "", "Options")
            if record := option.get_help_record(ctx):
                rows_by_topic[topic if len(options) > _FEW else "Options"].append(record)
        for title, rows in rows_by_topic.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def command(
    name: str, within: click.Group | None = None, *, installs: Callable[[Mapping[str, Any]], str] = lambda given: ""
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command from a function and add the options --json, -q and -v, which are passed as `printer`, and
    --print-recipe. If the function fails, the command prints one line and exits with the error's exit code.

    Args:
        within: the group to which the command is added, or None.
        installs: see `GroupedCommand`.
    """

    def make(function: Callable[..., None]) -> click.Command:
        click_command = GroupedCommand(
            name,
            callback=functools.partial(_run, function),
            help=function.__doc__,
            params=[*reversed(getattr(function, "__click_params__", [])), *_common_options()],
        )
        click_command.installs = installs
        if within is not None:
            within.add_command(click_command)
        return click_command

    return make


def _common_options() -> Iterator[click.Option]:
    yield click.Option(["--json", "as_json"], is_flag=True, help="Print only the result on stdout, as JSON.")
    yield click.Option(
        ["-q", "--quiet"], is_flag=True, help="Print no progress, no notes and no summary of written outputs."
    )
    yield click.Option(["-v", "--verbose"], is_flag=True, help="Print reasons and details.")
    yield click.Option(
        ["--print-recipe"], is_flag=True, help="Print this command as a recipe for `edgeq run`, and do nothing else."
    )


def _run(
    function: Callable[..., None], *, as_json: bool, quiet: bool, verbose: bool, print_recipe: bool, **parameters: Any
) -> None:
    # onnxruntime's quantizer warns about missing steps that edgeq has already done.
    logging.getLogger().setLevel(logging.ERROR)
    context = click.get_current_context()
    with ends_in_one_line(verbose=verbose):
        if print_recipe:
            click.echo(recipe_text(context))
            return
        check_threads()
        writes = "output" in parameters and not parameters.get("dry_run")
        printer = Printer(as_json, quiet, verbose, context.find_object(Budget), writes)
        try:
            function(printer=printer, **parameters)
        except EdgeqError as error:
            if as_json and not context.meta.get(_PRINTED):
                _show_error(type(error).__name__, error.problem, error.fix, error.exit_code)
            raise
        if not as_json and not quiet and (line := next_line(context)) is not None:
            click.echo(escape(f"next: {line}"))


def _show_error(kind: str, problem: str, fix: str, code: int) -> None:
    """Print an error as JSON on stdout. The caller still prints its line on stderr."""
    problem, fix = (hide_passwords(as_options(text)) for text in (problem, fix))
    words = {"type": kind, "problem": problem, "fix": fix, "exit_code": code}
    click.echo(format_json({"error": words}))
