from __future__ import annotations

import errno
import inspect
import re
import sys
import tempfile

import pytest
from click.testing import CliRunner

from edgeq import errors
from edgeq.cli._common import Printer, command
from edgeq.errors import DataError, EdgeqError, one_line, suggest
from edgeq.util.process import INTERRUPTED

TREE = sorted(
    (c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, EdgeqError)), key=lambda c: c.exit_code
)


def test_exit_codes_are_unique_and_leave_success_and_shells_alone() -> None:
    # a class without a code of its own uses its base class's
    codes = [c.exit_code for c in TREE if "exit_code" in vars(c)]
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


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("pi5", "raspberry-pi-5"),
        ("t4", "nvidia-t4"),
        ("8gen3", "snapdragon-8-gen-3"),
        ("raspbery-pi-5", "raspberry-pi-5"),
    ],
)
def test_a_part_of_a_name_is_enough_to_be_reminded_of_it(given: str, near: str) -> None:
    known = ["raspberry-pi-4", "raspberry-pi-5", "nvidia-t4", "snapdragon-8-gen-3", "width"]
    assert suggest(given, known) == f"Did you mean {near}?"
    assert suggest("pi", known) == "Did you mean raspberry-pi-4 or raspberry-pi-5?"
    assert suggest("id", known) == f"Known: {', '.join(sorted(known))}"
    assert suggest("", known) == suggest("-", known) == f"Known: {', '.join(sorted(known))}"


def run(raised: BaseException) -> tuple[int, str, str]:
    @command("fail")
    def fail(printer: Printer) -> None:
        raise raised

    result = CliRunner().invoke(fail, [])
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


def test_a_bug_is_called_one_and_shows_its_traceback_on_request() -> None:
    @command("fail")
    def fail(printer: Printer) -> None:
        raise ZeroDivisionError("by nothing")

    short = CliRunner().invoke(fail, [])
    assert (short.exit_code, short.stdout) == (1, "")
    assert short.stderr.startswith("edgeq: ZeroDivisionError: by nothing. This is a bug in edgeq")
    assert short.stderr.count("\n") == 1
    assert "-v" in short.stderr
    long = CliRunner().invoke(fail, ["-v"])
    assert long.exit_code == 1
    assert long.stderr.startswith("Traceback")
    assert long.stderr.splitlines()[-1].startswith("edgeq: ZeroDivisionError: by nothing. This is a bug in edgeq")


def test_memory_that_runs_out_is_no_bug() -> None:
    code, out, err = run(MemoryError())
    assert (code, out) == (errors.BudgetError.exit_code, "")
    assert err.startswith("edgeq: memory ran out")


def test_a_full_disk_that_no_free_space_explains_is_no_bug() -> None:
    code, _, err = run(OSError(errno.ENOSPC, "No space left on device", "/elsewhere/x"))
    assert (code, err) == (errors.OutputError.exit_code, "edgeq: /elsewhere/x: No space left on device\n")


def test_a_full_disk_of_work_files_is_named_so() -> None:
    work = tempfile.gettempdir()
    code, _, err = run(OSError(errno.ENOSPC, "No space left on device", f"{work}/edgeq-1/x"))
    line = f"edgeq: no space left in {work} for work files. Free some space, or set TMPDIR\n"
    assert (code, err) == (errors.OutputError.exit_code, line)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "fork")])
def test_no_threads_or_processes_are_no_bug(error: Exception) -> None:
    code, _, err = run(error)
    assert code == errors.BudgetError.exit_code
    assert "starts no more threads or processes" in err


def test_program_name_and_unknown_command() -> None:
    from edgeq.cli import group

    result = CliRunner().invoke(group, ["no-such-command"], prog_name="edgeq")
    assert result.exit_code == 2
    assert result.stderr == "edgeq: No such command 'no-such-command'. See `edgeq --help`\n"
    assert "edgeq.errors" in sys.modules


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("one\n two", 7, "one two"),
        ("one two three", None, "one two three"),
        ("one two three", 12, "one two…"),
        ("one two three", 8, "one two…"),
        ("it failed: (reason)", 12, "it failed…"),
        ("a " + "x" * 30, 10, "a xxxxxxx…"),
        ("x" * 30, 10, "xxxxxxxxx…"),
    ],
)
def test_a_long_text_is_cut_between_words(text: str, most: int | None, shown: str) -> None:
    assert one_line(ValueError(text), most=most) == shown
    assert most is None or len(shown) <= most
