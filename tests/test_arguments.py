"""Test the words for arguments in texts: options on the command line, arguments in Python, and names that look so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from edgeq.arguments import _IRREGULAR, _NAMES, as_arguments, as_options, with_marks
from edgeq.cli import group
from edgeq.errors import UsageError
from edgeq.util.records import marked, plain

EDGEQ = Path(__file__).resolve().parent.parent / "edgeq"


@pytest.mark.parametrize(
    ("text", "options", "arguments"),
    [
        ("Give ⟨task⟩, and ⟨format⟩ QDQ", "Give --task, and --format QDQ", "Give `task`, and `format` QDQ"),
        ("Pass ⟨force=True⟩ to replace it", "Pass --force to replace it", "Pass `force=True` to replace it"),
        ("⟨timed=False⟩ was given", "--no-timing was given", "`timed=False` was given"),
        ("Add ⟨per_channel=False⟩", "Add --no-per-channel", "Add `per_channel=False`"),
        ("Give ⟨statistics⟩ (⟨fix⟩)", "Give --statistics (--fix)", "Give `statistics` (`fix`)"),
        ("type `edgeq debug ⟨data⟩ D` or `⟨fix⟩`", "type `edgeq debug --data D` or `--fix`", None),
        ("⟨max_drop⟩ and a--b", "--max-drop and a--b", "`max_drop` and a--b"),
    ],
)
def test_marks_become_the_words_of_the_reader(text: str, options: str, arguments: str | None) -> None:
    assert as_options(text) == options
    assert as_arguments(text) == (options if arguments is None else arguments)


@pytest.mark.parametrize(
    "text",
    [
        "⟨data⟩",
        "the tensor ⟨conv 1⟩ is not known",
        "node ⟨weights⟩ has ⟨data=3⟩ and ⟨Data⟩",
        "/tmp/⟨data⟩/x is missing",
        "x⟨data⟩ and ⟨data⟩x are names",
        "⟨⟩ ⟨⟨data⟩⟩",
        "-- --x --unknown-thing",
    ],
)
def test_names_of_others_stay(text: str) -> None:
    assert as_options(text) == as_arguments(text) == text


def test_an_error_keeps_its_marks_and_shows_python_its_arguments() -> None:
    error = UsageError("⟨max_drop⟩ needs a task", "Give ⟨task⟩, or `edgeq eval ⟨task⟩ T`")
    assert str(error) == "`max_drop` needs a task. Give `task`, or `edgeq eval --task T`"
    assert as_options(error.text) == "--max-drop needs a task. Give --task, or `edgeq eval --task T`"


def test_records_name_options_and_pages_choose() -> None:
    assert plain({"notes": ["without ⟨data⟩, nothing"], "name": "⟨data⟩"}) == {
        "notes": ["without --data, nothing"],
        "name": "⟨data⟩",
    }
    assert marked(["without ⟨data⟩, nothing"]) == ["without ⟨data⟩, nothing"]


def test_the_runner_on_devices_names_its_options() -> None:
    assert with_marks("Pass --force, or leave --shape out") == "Pass ⟨force=True⟩, or leave ⟨shapes⟩ out"
    assert with_marks("trtexec --int8") == "trtexec --int8"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _options(inner, click.Context(inner, parent=context))
    else:
        yield from (name for option in command.get_params(context) for name in (*option.opts, *option.secondary_opts))


def test_every_argument_has_an_option() -> None:
    options = {*_options(group, click.Context(group)), "--bundle", "--top", "--official"}  # the last are the runner's
    texts = [as_options(f"⟨{argument}⟩ is one") for argument in (*_NAMES, *_IRREGULAR)]
    assert {text.split()[0] for text in texts} <= options


def test_every_mark_in_the_code_is_an_argument() -> None:
    marks = {
        mark for file in EDGEQ.rglob("*.py") for mark in re.findall(r"⟨[a-z_]+(?:=[\w']+)?⟩", file.read_text("utf-8"))
    }
    assert not [mark for mark in marks if as_options(f"{mark} is one").startswith("⟨")]
