"""Run every command of edgeq/skill.md in order, and check the exit codes and the JSON keys that it states."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.process import FAST_CLOCK, REPOSITORY, environment, run
from tests.docs.blocks import blocks, spans
from tests.docs.test_pages import PLACEHOLDER, parsed

SKILL = REPOSITORY / "edgeq" / "skill.md"
STATED = re.compile(r"# exit ([\d, or]+); keys: (.*)")


def stated() -> Iterator[tuple[str, list[int], list[str]]]:
    """Yield each command with its exit codes and keys, which the comment after the command states."""
    for block in blocks(SKILL):
        lines = block.text.splitlines()
        for command, comment in zip(lines[::2], lines[1::2], strict=True):
            found = STATED.fullmatch(comment)
            assert found is not None, f"no exit code after {command}"
            yield command, [int(code) for code in re.findall(r"\d+", found[1])], found[2].split(", ")


def has(value: Any, key: str) -> bool:
    """Return whether a dotted key is in a record. A list counts as its first item."""
    for name in key.split("."):
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def test_a_dotted_key_needs_all_its_names() -> None:
    assert has({"a": [{"b": None}]}, "a.b")
    assert not has({"a": []}, "a.b")
    assert not has({"a": {"b": None}}, "a.b.c")


@pytest.mark.slow
def test_each_command_has_the_stated_exit_code_and_keys(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(FAST_CLOCK), environment()["PYTHONPATH"]])
    own = {"PYTHONPATH": paths, "XDG_CONFIG_HOME": str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path / "own")}
    for command, codes, keys in stated():
        done = run(*shlex.split(command)[1:], cwd=tmp_path, env=own)
        assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stderr}"
        record = json.loads(done.stdout)
        assert [key for key in keys if not has(record, key)] == [], command


def test_the_text_is_short_and_its_commands_exist() -> None:
    assert len(SKILL.read_text("utf-8").splitlines()) <= 150
    named = [span.split()[1:] for _, span in spans(SKILL) if re.match("edgeq [a-z]", span)]
    wrong = [words for words in named if parsed([word for word in words if not PLACEHOLDER.search(word)])]
    assert wrong == [["quantise"]]


def test_edgeq_prints_the_text() -> None:
    done = run("info", "--skill", cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, SKILL.read_text("utf-8"))
