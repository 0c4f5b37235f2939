"""Share what the command lines of the older tools have in common: their way of writing booleans, and errors in one
line.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from edgeq_device.budget import renew
from edgeq_device.relay import printable

from edgeq.data.open_source import find_files, find_sidecar
from edgeq.errors import UsageError
from edgeq.util.display import Advance
from edgeq.util.process import begin, ends_in_one_line

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}
_YEARS = 1 << 30


class PrintedProgress:
    """Show the progress of a command that users redirect: its notes on stderr, nothing else."""

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Print nothing about the steps of a stage."""
        del title, total
        yield lambda steps: None

    def note(self, text: str) -> None:
        """Print a note as a line on stderr."""
        click.echo(printable(text), err=True)


def say(*lines: str) -> None:
    """Print lines, or a text of several, whose names are untrusted."""
    for line in lines:
        click.echo("\n".join(map(printable, line.split("\n"))))


def says(run: Callable[..., Iterable[str]]) -> Callable[..., None]:
    """Return a function that prints the lines that `run` gives."""

    @functools.wraps(run)
    def saying(**options: Any) -> None:
        say(*run(**options))

    return saying


def switch(*names: str, help: str) -> Callable[[F], F]:
    """Define a boolean that may stand alone (`--flag`) or state its value (`--flag True`, `--flag=false`, `--flag 0`).

    The older tools took some of theirs as text of which every spelling, "False" too, was true.
    """
    return click.option(*names, is_flag=False, flag_value="true", default="false", type=click.BOOL, help=help)


class OneOf(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """Take one value, where the older tool took a comma-separated list and ran once for each."""

    def __init__(self, value: click.ParamType) -> None:  # type: ignore[type-arg]
        self._value, self.name = value, value.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """As the value's own type writes it."""
        return self._value.get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; a list is refused with what to type."""
        if isinstance(value, str) and "," in value and param is not None:
            first = value.split(",")[0].strip()
            self.fail(f"one value a run is taken. Type {param.opts[0]} {first}, then run the others", param, ctx)
        return self._value.convert(value, param, ctx)


class Command(click.Command):
    """Define a command that ends with at most one line on errors, wrong options among them, and with their exit
    code.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run it and exit."""
        with ends_in_one_line():
            code = super().main(*args, **{**options, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)


def run_printed(run: Callable[[Sequence[str]], str]) -> None:
    """Print what a command with a parser of its own says, given the arguments of the process."""
    with ends_in_one_line():
        print(run(sys.argv[1:]))


def run_program(command: Callable[[], Any]) -> None:
    """Run a module's command as the program that `python -m` started, under the limits of a budget.

    The module must not have imported onnxruntime: it starts threads, which a process does not take along when it forks.
    """
    budget = begin()
    if budget is not None and budget.seconds:
        # Many of these commands report no progress, which would renew their time: only a model's shapes are timed.
        renew(replace(budget, seconds=_YEARS))
    command()


class ArgumentParser(argparse.ArgumentParser):
    """Parse options that take lists of names (`--nodes_to_exclude conv1 conv2`), which click lacks."""

    def error(self, message: str) -> NoReturn:
        """Report wrong options as an edgeq error."""
        raise UsageError(message, f"See `python -m {self.prog} --help`")


def images_or_arrays(dataset: str, for_images: str) -> str | None:
    """Return the preprocessing `for_images` where a data set is images without a record of theirs; else None, which
    takes that record or leaves arrays as they are."""
    if find_sidecar([Path(dataset)]) is not None:  # it may choose among several kinds of files
        return None
    found = find_files(dataset)
    return for_images if found.kind == "images" and find_sidecar([found.root]) is None else None
