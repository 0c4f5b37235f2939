"""Test environments of containers and batch systems: no home, no further processes, no folder for work files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.errors import BudgetError, OutputError
from edgeq.util.folders import user_folder
from tests.cli import process
from tests.graphs import proto

NOBODY = 54321
"""A user without an entry in the list of users, who may read what this one may."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Make a filled folder outside of pytest's folders, which other users may not enter."""
    with tempfile.TemporaryDirectory() as name:
        yield filled(Path(name))


def filled(folder: Path) -> Path:
    folder.chmod(0o777)
    random = np.random.default_rng(0)
    body = "g (float[1, 128] x) => (float[1, 128] y) { [mm] y = MatMul(x, w) }"
    onnx.save(proto(body, {"w": random.normal(size=(128, 128)).astype(np.float32)}), folder / "m.onnx")
    np.savez(folder / "x.npz", x=random.normal(size=(4, 1, 128)).astype(np.float32))
    return folder


def run(place: Path, *words: str, prefix: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a command and return its exit code and its stderr without notes."""
    done = subprocess.run(
        [*prefix, *process.COMMAND, *words, "-q"], cwd=place, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def nobody() -> list[str]:
    powers = "+dac_override,+dac_read_search"
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    prefix += [f"--inh-caps={powers}", f"--ambient-caps={powers}"]
    return needed(prefix, "programs cannot be started as another user here")


def private(script: str) -> list[str]:
    """Return a command prefix that runs `script` first, to mount file systems that only this command sees."""
    prefix = ["unshare", "-m", "bash", "-c", f'set -e; {script}; exec "$@"', "bash"]
    return needed(prefix, "nothing can be mounted here")


def needed(prefix: list[str], problem: str) -> list[str]:
    """Return the prefix, or skip the test if the prefix does not work here."""
    works = shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if not works or works.returncode:
        pytest.skip(problem)
    return prefix


def test_without_a_home(place: Path) -> None:
    bare = {"PYTHONPATH": process.environment()["PYTHONPATH"], "PATH": os.environ["PATH"]}
    package = ("package", "m.onnx", "--data", "x.npz", "-t", "this-machine", "-t", "raspberry-pi-5", "--no-timing")
    for words in (("doctor",), ("device", "list"), (*package, "-o", "bundle")):
        assert run(place, *words, prefix=nobody(), env=bare) == (0, "")
    code, line = run(place, "emulate", "status", prefix=nobody(), env=bare)
    assert (code, line.count("\n")) == (8, 1)
    assert "Set XDG_CACHE_HOME" in line


def test_folders_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (RuntimeError("no home"), Path("~/.config/edgeq"), Path("/home/me/.config/edgeq")):

        def answer(app: str, found: Exception | Path = found) -> Path:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr("platformdirs.user_config_path", answer)
        assert user_folder("config") == (found if found == Path("/home/me/.config/edgeq") else None)


@pytest.mark.parametrize("most", [1, 2])
def test_no_threads_or_processes_are_left(most: int, place: Path) -> None:
    """A limit on threads and processes ends the command in one line.

    The limit of 1 allows only the process itself, and the limit of 2 also a child, but none of numpy's threads.
    """
    if (os.cpu_count() or 1) < most:
        pytest.skip("one core needs no further thread")
    prefix = [*nobody(), "bash", "-c", f'ulimit -u {most}; exec "$@"', "bash"]
    code, line = run(place, "inspect", "m.onnx", prefix=prefix, env=process.environment(HOME="/nowhere"))
    assert code == BudgetError.exit_code, line
    assert line.count("\n") == 1
    assert "starts no more threads or processes" in line


def test_no_folder_for_work_files(place: Path) -> None:
    folders = " ".join(f"{folder}" for folder in ("/tmp", "/var/tmp", "/usr/tmp") if Path(folder).is_dir())
    paths = ":".join([*process.environment()["PYTHONPATH"].split(":")])
    if any(path.startswith("/tmp") for path in (*paths.split(":"), sys.executable)):
        pytest.skip("this checkout lies in the folder for work files")
    keep = f"mount --bind {place} /mnt; cd /mnt; mount -o remount,ro,bind /mnt; cd /mnt"
    hidden = "; ".join(f"mount -t tmpfs -o ro none {folder}" for folder in folders.split())
    env = process.environment(TMPDIR="/nowhere")
    code, line = run(place, "inspect", "m.onnx", prefix=private(f"{keep}; {hidden}"), env=env)
    assert code == OutputError.exit_code, line
    assert line == "edgeq: no folder for work files can be written. Set TMPDIR to one\n"


def test_a_full_folder_for_work_files_is_named(place: Path, tmp_path: Path) -> None:
    """If the folder for work files is full, the error names this folder and not standard output."""
    work = tmp_path / "work"
    work.mkdir()
    full = private(f"mount -t tmpfs -o size=40k none {work}")
    for words in (("inspect", "m.onnx"), ("compare", "m.onnx", "m.onnx", "--data", "x.npz", "--no-timing")):
        code, line = run(place, *words, prefix=full, env=process.environment(TMPDIR=str(work)))
        assert code == OutputError.exit_code, line
        assert line.count("\n") == 1
        assert str(work) in line
        assert "standard output" not in line
