"""Test a user's own Python file: how it is loaded, and how its errors name the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edgeq.cli import group
from edgeq.demo import CALIBRATION, MODEL
from edgeq.errors import DataError, UsageError
from edgeq.util.user_code import describe_error, find_place, load_function

FILE = """from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Settings:
    size: int | None = 3

def fails(x):
    raise ValueError("first\\nsecond")

def lacks(x):
    import nothing_of_that_name

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def raised(file: Path, name: str) -> Exception:
    with pytest.raises((ValueError, ImportError)) as info:
        load_function(f"{file}:{name}", "task", UsageError)(None)
    return info.value


def test_names_the_failure_and_its_line(file: Path) -> None:
    assert describe_error(raised(file, "fails")) == ("mine.py:9: ValueError: first second", "Correct mine.py")
    text, fix = describe_error(raised(file, "lacks"))
    assert text == "mine.py:12: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert fix == "Install nothing_of_that_name for the Python that runs edgeq"


def test_other_code_is_not_the_users() -> None:
    with pytest.raises(ValueError, match="invalid literal") as info:
        int("three")
    assert find_place(info.value) == ""
    assert describe_error(info.value)[0].startswith("ValueError: invalid literal")


@pytest.mark.parametrize("kind", [UsageError, DataError])
@pytest.mark.parametrize("name", ["absent", "number", ""])
def test_no_such_function(file: Path, kind: type[UsageError], name: str) -> None:
    with pytest.raises(kind, match=f"mine.py has no function '{name}'"):
        load_function(f"{file}:{name}", "task", kind)


def test_a_file_that_fails_when_it_is_run(file: Path) -> None:
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(UsageError, match=r"mine.py cannot be imported: mine.py:1: .* Install nothing_of_that_name"):
        load_function(f"{file}:task", "task", UsageError)
    with pytest.raises(UsageError, match="does not exist"):
        load_function("absent.py:task", "task", UsageError)


TASK = """
class Task:
    name, primary, higher_is_better = "mine", "share", True

    def start(self):
        return self

    def update(self, outputs, sample):
        return len(outputs) / 0

def make(options):
    return Task()

def broken(options):
    return options["size"]
"""


@pytest.mark.parametrize(("name", "line"), [("make", "9: ZeroDivisionError"), ("broken", "15: TypeError")])
def test_a_task_that_fails_is_no_bug_in_edgeq(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "own.py").write_text(TASK)
    command = ["eval", str(MODEL), "--data", str(CALIBRATION), "--task", f"{tmp_path / 'own.py'}:{name}", "-q"]
    result = CliRunner().invoke(group, command)
    assert result.exit_code == UsageError.exit_code
    assert result.stderr.startswith(f"edgeq: own.py:{line}")
    assert result.stderr.endswith("Correct own.py (run it with -v for the traceback)\n")
    assert "bug" not in result.stderr
