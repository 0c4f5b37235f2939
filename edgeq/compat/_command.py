"""Provide what the older tools' command lines have in common: the spelling of booleans, and errors in one line."""

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
from edgeq_device.system.budget import renew
from edgeq_device.system.relay import printable

from edgeq.arguments import as_options
from edgeq.data.open_source import find_files, find_sidecar
from edgeq.errors import UsageError
from edgeq.util.display import Advance
from edgeq.util.process import begin, ends_in_one_line

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}
_YEARS = 1 << 30


class PrintedProgress:
    """Print a command's notes on stderr and print no progress, because users redirect the output of these commands."""

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Print nothing about the steps of a stage."""
        del title, total
        yield lambda steps: None

    def note(self, text: str) -> None:
        """Print a note as a line on stderr."""
        click.echo(printable(as_options(text)), err=True)


def say(*lines: str) -> None:
    """Print texts of one or more lines. Escape the control characters in them, because names may be untrusted."""
    for line in lines:
        click.echo("\n".join(map(printable, as_options(line).split("\n"))))


def says(run: Callable[..., Iterable[str]]) -> Callable[..., None]:
    """Return a function that calls `run` and prints the lines that it returns."""

    @functools.wraps(run)
    def saying(**options: Any) -> None:
        say(*run(**options))

    return saying


def switch(*names: str, help: str) -> Callable[[F], F]:
    """Define a boolean option with an optional value (`--flag`, `--flag True`, `--flag=false`, `--flag 0`).

    The older tools read some booleans as text, and any text counted as true, even "False".
    """
    return click.option(*names, is_flag=False, flag_value="true", default="false", type=click.BOOL, help=help)


class OneOf(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """Accept one value. The older tool accepted a comma-separated list and ran once for each value."""

    def __init__(self, value: click.ParamType) -> None:  # type: ignore[type-arg]
        self._value, self.name = value, value.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return the placeholder of the value's own type."""
        return self._value.get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the converted value. Refuse a list, with a message that shows what to type."""
        if isinstance(value, str) and "," in value and param is not None:
            first = value.split(",")[0].strip()
            self.fail(
                f"only one value per run is allowed. Type {param.opts[0]} {first}, then run the others", param, ctx
            )
        return self._value.convert(value, param, ctx)


class OneLineCommand(click.Command):
    """Define a command that prints at most one line for an error and exits with the error's code. Errors in the options
    are treated in the same way.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command and exit."""
        with ends_in_one_line():
            code = super().main(*args, **{**options, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)


def run_printed(run: Callable[[Sequence[str]], str]) -> None:
    """Call `run` with the arguments of the process, which `run` parses itself, and print the text that it returns."""
    with ends_in_one_line():
        print(run(sys.argv[1:]))


def run_program(command: Callable[[], Any]) -> None:
    """Run a module's command as the program that `python -m` started, within memory and time limits.

    The module must not have imported onnxruntime before this call, because onnxruntime starts threads, which a forked
    process loses.
    """
    budget = begin()
    if budget is not None and budget.seconds:
        # Only the work on a model's shapes has a time limit. Each progress step would renew a limit on the whole
        # command, but many of these commands do not report progress.
        renew(replace(budget, seconds=_YEARS))
    command()


class ArgumentParser(argparse.ArgumentParser):
    """Parse options that accept lists of names (`--nodes_to_exclude conv1 conv2`). click does not support these
    options.
    """

    def error(self, message: str) -> NoReturn:
        """Report wrong options as an edgeq error."""
        raise UsageError(message, f"See `python -m {self.prog} --help`")


def images_or_arrays(dataset: str, for_images: str) -> str | None:
    """Return the preprocessing `for_images` if a data set consists of images and has no preprocessing file. Otherwise
    return None: then the file applies, or arrays stay as they are.
    """
    if find_sidecar([Path(dataset)]) is not None:  # the preprocessing file may choose among several kinds of files
        return None
    found = find_files(dataset)
    return for_images if found.kind == "images" and find_sidecar([found.root]) is None else None
