"""Provide boards without a network. An `ssh` on PATH runs the command here, with a home and a Python for each board."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeq import demo
from edgeq.data.open_source import Data
from edgeq.jobs.package import package

# This ssh takes the options that edgeq gives. HOSTS/NAME/ is a board, with its home, its `bin` and its faults. The
# board's programs lose their input when this ssh is killed, as they do when a link is cut.
_SSH = """#!{python} -IS
import os, subprocess, sys, threading
words = sys.argv[1:]
at = words.index("--")
board = os.path.join({hosts!r}, words[at + 1])
if not os.path.isdir(board):
    sys.exit(os.write(2, b"ssh: Could not resolve hostname x: Name or service not known") and 255)
if os.path.exists(board + "/fails"):
    sys.exit(os.write(2, open(board + "/fails", "rb").read()) and 255)
with open(board + "/links", "a") as links:
    links.write("%d\\n" % os.getpid())
environment = dict(os.environ, HOME=board + "/home", PATH=board + "/bin:" + os.environ["PATH"])
environment.pop("XDG_CACHE_HOME", None)
child = subprocess.Popen(["sh", "-c", words[at + 2]], stdin=subprocess.PIPE, env=environment)
def pump():
    while data := os.read(0, 65536):
        child.stdin.write(data)
        child.stdin.flush()
    child.stdin.close()
threading.Thread(target=pump, daemon=True).start()
os._exit(child.wait() % 256)
"""


@dataclass(frozen=True)
class FakeBoard:
    """Imitate a board. `cache` is the only folder that edgeq may write to."""

    name: str
    path: Path

    @property
    def address(self) -> str:
        return f"ssh://{self.name}"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "edgeq-device"

    def fails(self, text: str) -> None:
        """Make ssh print this text and fail from now on."""
        (self.path / "fails").write_text(text)

    def python(self, text: str) -> None:
        """Replace the board's `python3` with this shell script."""
        script = self.path / "bin" / "python3"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)

    def patched(self, statement: str) -> None:
        """Make the board's Python run `statement` before edgeq's program, but not before a bundle's own runner."""
        first = self.path / "first.py"
        start = "sys.argv = sys.argv[3:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        first.write_text(f"import sys, runpy\n{statement}\n{start}")
        self.python(f'case "$1" in -I) exec {sys.executable} {first} "$@";; *) exec {sys.executable} "$@";; esac')

    def cut(self) -> None:
        """Kill the process of every link to the board."""
        ssh = os.fsencode(self.path.parent.parent / "programs" / "ssh")
        for line in (self.path / "links").read_text().split():
            with suppress(OSError):  # the process has ended
                if ssh in Path(f"/proc/{line}/cmdline").read_bytes():
                    os.kill(int(line), 9)


@pytest.fixture
def make_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeBoard]:
    """Return a function that makes a board of a given name."""
    hosts, programs = tmp_path / "hosts", tmp_path / "programs"
    hosts.mkdir()
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(_SSH.format(hosts=str(hosts), python=sys.executable))
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("platformdirs.user_config_path", lambda app: tmp_path / "config")

    def make(name: str) -> FakeBoard:
        board = FakeBoard(name, hosts / name)
        (board.path / "bin").mkdir(parents=True)
        board.home.mkdir()
        board.python(f'exec {sys.executable} "$@"')
        return board

    return make


@pytest.fixture
def board(make_board: Callable[[str], FakeBoard]) -> FakeBoard:
    return make_board("pi")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package the demo model for this machine. Tests must not change the bundle."""
    output = tmp_path_factory.mktemp("boards") / "bundle"
    package(demo.MODEL, Data(demo.CALIBRATION, count=8), output, targets=("auto",), timed=False, with_float=True)
    return output
