from __future__ import annotations

import inspect
import re
import sys

import click
import pytest
from click.testing import CliRunner

from edgeq import errors
from edgeq.cli._common import INTERRUPTED, Face, common
from edgeq.errors import DataError, EdgeqError

TREE = sorted(
    (c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, EdgeqError)), key=lambda c: c.exit_code
)


def test_exit_codes_are_unique_and_leave_success_and_shells_alone() -> None:
    codes = [c.exit_code for c in TREE]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 126 for code in codes)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {name: int(code) for name, code in re.findall(r"(\w+Error)\s+(\d+)", errors.__doc__ or "")}
    assert drawn == {c.__name__: c.exit_code for c in TREE}


def test_message_is_the_problem_and_the_fix() -> None:
    error = DataError("photos/: no image in it", "Name a folder that holds images")
    assert str(error) == "photos/: no image in it. Name a folder that holds images"
    assert (error.problem, error.fix) == ("photos/: no image in it", "Name a folder that holds images")
    assert str(EdgeqError("broken")) == "broken"


def run(raised: BaseException) -> tuple[int, str, str]:
    @click.command()
    @common
    def command(face: Face) -> None:
        raise raised

    result = CliRunner().invoke(command, [])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("kind", TREE, ids=lambda c: c.__name__)
def test_a_command_ends_on_one_line_and_the_exit_code(kind: type[EdgeqError]) -> None:
    code, out, err = run(kind("model.onnx: not a model", "Export it again"))
    assert (code, out) == (kind.exit_code, "")
    assert err == "edgeq: model.onnx: not a model. Export it again\n"


def test_interruption_ends_on_one_line_too() -> None:
    code, out, err = run(KeyboardInterrupt())
    assert (code, out) == (INTERRUPTED, "")
    assert err.count("\n") == 1
    assert "interrupted" in err


def test_a_bug_is_not_dressed_up_as_bad_input() -> None:
    @click.command()
    @common
    def command(face: Face) -> None:
        raise ZeroDivisionError

    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ZeroDivisionError)


def test_program_name_and_unknown_command() -> None:
    from edgeq.cli import group

    result = CliRunner().invoke(group, ["no-such-command"], prog_name="edgeq")
    assert result.exit_code == 2
    assert "no-such-command" in result.stderr
    assert "edgeq.errors" in sys.modules
