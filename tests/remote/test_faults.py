"""Test faults of a board under the commands that measure on it: one line, exit code 8, nothing half done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgeq import demo
from edgeq.cli import group
from edgeq.errors import BoardError
from edgeq.remote.devices import find_board
from edgeq.remote.session import open_board
from tests.remote.conftest import FakeBoard

COMMANDS = {
    "tune": ("tune", demo.MODEL, "--data", demo.CALIBRATION, "-o", "out"),
    "bench": ("bench", demo.MODEL),
    "gate": ("gate", demo.MODEL, "--baseline", "base.onnx", "--markdown"),
}
_CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."


def _hangs(board: FakeBoard, command: str) -> None:
    """Make the board's programs with this name never answer."""
    board.python(f'case "$*" in *" attach "*) ;; *{command}*) exec sleep 60;; esac; exec {sys.executable} "$@"')


@contextmanager
def _used(board: FakeBoard) -> Iterator[None]:
    with open_board(find_board(board.address)):
        yield


FAULTS: dict[str, tuple[Callable[[FakeBoard], AbstractContextManager[None] | None], str]] = {
    "Python 3.7": (
        lambda board: board.patched("sys.version_info = (3, 7, 3, 'final', 0)"),
        "Python 3.7.3 there is older than 3.9",
    ),
    "no numpy": (lambda board: board.patched("sys.modules['numpy'] = None"), "has no numpy. Install it"),
    "no onnxruntime": (lambda board: board.patched("sys.modules['onnxruntime'] = None"), "has no onnxruntime. Install"),
    "neither": (lambda board: board.python(f'exec {sys.executable} -S "$@"'), "has no numpy and no onnxruntime"),
    "no Python": (lambda board: board.python("exit 95"), "pi has no python3"),
    "another host key": (lambda board: board.fails(_CHANGED), "ssh-keygen -R pi"),
    "another user": (_used, "is in use by"),
    "a full disk": (lambda board: board.python(f'ulimit -f 8; exec {sys.executable} "$@"'), "MB are free there"),
    "its Python hangs": (lambda board: _hangs(board, "board-"), "does not answer within 1 s"),
    "its programs hang": (lambda board: _hangs(board, "edgeq_guest"), "does not answer within 1 s"),
}


OTHERS = [(fault, command) for fault in ("neither", "its programs hang") for command in ("bench", "gate")]


@pytest.mark.parametrize(("fault", "command"), [*((fault, "tune") for fault in FAULTS), *OTHERS])
def test_one_line(fault: str, command: str, board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # an added doc string changes the bytes
    (tmp_path / "base.onnx").write_bytes(demo.MODEL.read_bytes() + b"\x32\x01x")
    begin, says = FAULTS[fault]
    with monkeypatch.context() as patch, begin(board) or nullcontext():
        if "hang" in fault:
            for name in ("ANSWER_S", "ALIVE_S", "REQUEST_S", "BENCH_S"):
                patch.setattr(f"edgeq.remote.link.{name}", 1.0)
            patch.setattr("edgeq.remote.link.BENCH_FACTOR", 0.0)
        done = CliRunner().invoke(group, [*map(str, COMMANDS[command]), "--on", board.address, "-q"])
    assert done.exit_code == BoardError.exit_code, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "out").exists()
    board.python(f'exec {sys.executable} "$@"')
    (board.path / "fails").unlink(missing_ok=True)
    with open_board(find_board(board.address)) as session:  # the board works as before
        session.require("numpy", "onnxruntime")
        assert [path for path in (board.cache / "tmp").rglob("*") if path.is_file()] == []
    assert {path.name for path in board.home.iterdir()} <= {".cache"}
