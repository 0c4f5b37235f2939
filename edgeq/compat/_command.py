"""Run the older tools' command lines: errors in one line, and limits of memory and time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
from edgeq_device.system.budget import renew

from edgeq.util.process import begin, ends_in_one_line

# 34 years in seconds, which is the same as no limit.
_YEARS = 1 << 30


class OneLineCommand(click.Command):
    """Define a command that prints at most one line for an error and exits with the error's code. Errors in the options
    are treated in the same way.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command and exit."""
        with ends_in_one_line():
            # In click's standalone mode, click would print errors in its own form and exit.
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
