"""Test that the scripts are valid and executable, report a missing Python clearly, and do nothing if nothing changed.

The tests of `Tree` run `scripts/common.sh` in a copied tree with a stand-in for Python. So no test uses the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BASH = shutil.which("bash")
COMMANDS = [
    "scripts/quickstart",
    "scripts/test",
    "scripts/lint",
    "scripts/benchmark",
    "scripts/docs",
    "scripts/fuzz",
    "scripts/golden",
    "scripts/with-tools",
    ".ci/run",
]

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")

# Handles the four calls that common.sh makes of Python, and logs its calls.
STAND_IN = r"""#!/bin/bash
case "$*" in
  "-c import sys"*) exit "${TOO_OLD:-0}" ;;
  "-c import pip") exit 0 ;;
  "--version") echo "Python 3.11.0" ;;
  "-m venv --clear --without-pip "*) mkdir -p "$5/bin"; cp "$0" "$5/bin/python" ;;
  "-m venv --clear "*) [[ -z "${NO_ENSUREPIP:-}" ]] || exit 1; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  *pip*install*) echo "$*" >> "$DIARY"; exit "${PIP_FAILS:-0}" ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


@pytest.mark.parametrize("script", COMMANDS)
def test_script_is_executable_strict_bash(script: str) -> None:
    path = REPOSITORY / script
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("script", [*COMMANDS, "scripts/common.sh"])
def test_script_parses(script: str) -> None:
    assert BASH is not None
    done = subprocess.run([BASH, "-n", str(REPOSITORY / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Tree:
    """Make a checkout of only the files that common.sh reads, and a PATH that contains one stand-in for python3."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a checkout"
        self.diary = root / "diary"
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(REPOSITORY / "scripts" / "common.sh", self.root / "scripts")
        for folder in ("edgeq", "profiles", "targets"):
            (self.root / folder).mkdir()
            (self.root / folder / "file").write_text("1")
        for file in ("pyproject.toml", "README.md"):
            (self.root / file).write_text("1")
        self.path = root / "bin"
        self.path.mkdir()
        stand_in = self.path / "python3"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        for tool in ("basename", "dirname", "cat", "cksum", "find", "mkdir", "cp", "rm", "sort", "xargs", "bash"):
            found = shutil.which(tool)
            assert found is not None, tool
            (self.path / tool).symlink_to(found)

    def use(self, mode: str = "copy", **environment: str) -> subprocess.CompletedProcess[str]:
        assert BASH is not None
        script = f'set -euo pipefail; source "$0"; use_environment demo "[cpu]" {mode}; echo "$python"'
        return subprocess.run(
            [BASH, "-c", script, str(self.root / "scripts" / "common.sh")],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.root.parent,
            env={"PATH": str(self.path), "DIARY": str(self.diary), **environment},
        )

    def installs(self) -> list[str]:
        return self.diary.read_text().splitlines() if self.diary.exists() else []


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_an_environment_is_made_once(tree: Tree) -> None:
    first = tree.use()
    assert (first.returncode, first.stdout) == (0, f"{tree.root}/.venv-demo/bin/python\n"), first.stderr
    assert "Installing edgeq[cpu]" in first.stderr
    second = tree.use()
    assert (second.returncode, second.stderr) == (0, "")
    assert tree.installs() == [f"-m pip install -qq {tree.root}[cpu]"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "edgeq/file", "profiles/file", "targets/file"])
def test_a_copy_is_installed_again_when_the_source_changed(tree: Tree, changed: str) -> None:
    tree.use()
    (tree.root / changed).write_text("2")
    assert tree.use().returncode == 0
    assert len(tree.installs()) == 2


def test_an_editable_install_follows_the_source_by_itself(tree: Tree) -> None:
    tree.use("editable")
    (tree.root / "edgeq" / "file").write_text("2")
    tree.use("editable")
    assert len(tree.installs()) == 1
    (tree.root / "pyproject.toml").write_text("2")
    tree.use("editable")
    assert len(tree.installs()) == 2


def test_a_failed_install_is_not_taken_for_done(tree: Tree) -> None:
    failed = tree.use(PIP_FAILS="1")
    assert failed.returncode == 1
    assert "pip could not install edgeq[cpu]" in failed.stderr
    assert tree.use().returncode == 0
    assert len(tree.installs()) == 2


def test_without_ensurepip_the_outer_pip_helps(tree: Tree) -> None:
    assert tree.use(NO_ENSUREPIP="1").returncode == 0
    assert tree.installs()[0].endswith("/.venv-demo/bin/python install -qq pip")


def test_an_old_python_is_refused_with_what_to_do(tree: Tree) -> None:
    done = tree.use(TOO_OLD="1")
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr
    assert "PYTHON=" in done.stderr
    assert tree.installs() == []


def test_a_named_python_is_not_silently_replaced(tree: Tree) -> None:
    done = tree.use(PYTHON="/absent/python")
    assert done.returncode == 1
    assert "PYTHON=/absent/python is not a Python 3.11 or newer" in done.stderr
