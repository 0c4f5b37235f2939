"""Define the texts of options that can be checked before a command runs, such as names of targets and of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from edgeq.errors import DataError
from edgeq.util.registry import DECODERS, RECOVERIES, TASKS, ExtensionGroup
from edgeq.util.user_code import find_user_file, names_function


class CheckedText(click.types.StringParamType):
    """Mark a text that can be checked before the command runs. `edgeq run` checks all of a recipe's texts first.

    Args:
        check: function that takes the text and raises an EdgeqError if it is wrong. The function runs none of the
            user's code and connects to no other machine.
    """

    def __init__(self, check: Callable[[str], object]) -> None:
        self.check = check


def _check_target(name: str) -> None:
    from edgeq.hardware.target import resolve

    resolve(name)


def _check_engine(name: str) -> None:
    from edgeq.run.engines import choose_engine

    choose_engine(name)


def _check_source(source: str) -> None:
    from edgeq.data.open_source import check_source

    check_source(source)


def _check_input(text: str) -> None:
    """Check a source, or NAME=SOURCE."""
    from edgeq.data.open_source import check_source

    check_source(text if Path(text).exists() else text.rpartition("=")[2])


def _check_preprocess(text: str) -> None:
    from edgeq.data.preprocess import load_preprocess

    if names_function(text):
        find_user_file(text, "preprocessing", DataError)
    else:
        load_preprocess(text)


def _check_head(text: str) -> None:
    from edgeq.measure.find_head import HeadChoice

    HeadChoice.parse(text)


def _check_drop(text: str) -> None:
    from edgeq.util.numbers import parse_drop

    parse_drop(text)


def _check_extension(group: ExtensionGroup) -> Callable[[str], None]:
    """Return a function that checks the name of an extension, or the file of a user's own extension."""

    def check(name: str) -> None:
        if names_function(name):
            find_user_file(name, group.title, group.error)
        else:
            group.check(name)

    return check


TARGET, HEAD, DROP = CheckedText(_check_target), CheckedText(_check_head), CheckedText(_check_drop)
ENGINE_NAME, SOURCE, INPUT = (CheckedText(check) for check in (_check_engine, _check_source, _check_input))
PREPROCESS_NAME = CheckedText(_check_preprocess)
TASK, DECODER, RECOVERY = (CheckedText(_check_extension(group)) for group in (TASKS, DECODERS, RECOVERIES))
