"""Test the lock, the store and the environment of a board, through a stand-in for ssh."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeq.errors import BoardError
from edgeq.remote.devices import find_board
from edgeq.remote.session import BoardSession, open_board
from edgeq.util.folders import shipped
from tests.remote.conftest import FakeBoard


def opened(board: FakeBoard):  # type: ignore[no-untyped-def]
    return open_board(find_board(board.address))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def payload(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "a").write_bytes(os.urandom(300_000))
    (tmp_path / "b").write_bytes(b"")
    return {"a.bin": tmp_path / "a", "deep/b": tmp_path / "b", "twice": tmp_path / "a"}


def test_files_on_the_board_are_not_sent_again(board: FakeBoard, payload: dict[str, Path]) -> None:
    with opened(board) as session:
        place = Path(session.send(payload))
        assert (place / "a.bin").read_bytes() == (place / "twice").read_bytes() == payload["a.bin"].read_bytes()
        assert files(place) == {"a.bin", "deep/b", "twice"}
        assert 300_000 < session.channel.sent < 330_000
    with opened(board) as session:
        assert session.send(payload) == str(place)
        assert session.channel.sent < 3_000
    assert files(board.home) == {f".cache/edgeq-device/{name}" for name in files(board.cache)}
    assert not any((board.cache / "tmp").iterdir())


def test_damaged_files_are_sent_again(board: FakeBoard, payload: dict[str, Path]) -> None:
    with opened(board) as session:
        place = Path(session.send(payload))
        (place / "a.bin").chmod(0o600)
        (place / "a.bin").write_bytes(b"x" * 300_000)
        (place / "stray.pyc").write_bytes(b"x")
        assert session.send(payload) == str(place)
        assert (place / "twice").read_bytes() == (place / "a.bin").read_bytes() == payload["a.bin"].read_bytes()
        assert not (place / "stray.pyc").exists()


def test_files_for_one_session_are_removed_at_its_end(board: FakeBoard, payload: dict[str, Path]) -> None:
    with opened(board) as session:
        place = Path(session.send(payload, keep=False))
        assert (place / "a.bin").is_file()
    assert not place.exists()


def test_one_user_at_a_time(board: FakeBoard) -> None:
    with (
        opened(board),
        pytest.raises(BoardError, match=r"ssh://pi is in use by \S+@\S+ since \d\d:\d\d"),
        opened(board),
    ):
        raise AssertionError
    with opened(board):
        pass


def test_a_link_that_was_cut(board: FakeBoard, payload: dict[str, Path]) -> None:
    with opened(board) as session:
        board.cut()
        with pytest.raises(BoardError, match="ssh://pi: the link was cut"):
            session.send(payload)
    with opened(board) as session:  # the lock ended with the process that held it
        session.send(payload)


def test_half_a_file_is_a_cut_link_and_no_answer(tmp_path: Path) -> None:
    """Half a file means a cut link, so the board sends no answer. Nobody would receive it, or it would arrive before
    the loss of the link is known.
    """
    program = shipped("targets") / "runtime" / "edgeq_board.py"
    request = json.dumps({"do": "put", "keep": True, "size": 10, "sha256": "0" * 64}).encode()
    command = [sys.executable, str(program), "serve", str(tmp_path), "someone"]
    done = subprocess.run(command, input=request + b"\nhalf", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 1), done.stderr


def test_programs_end_with_the_session(board: FakeBoard, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os,time; open({str(mark)!r},'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(BoardError, match="does not answer within 2 s"), opened(board) as session:
        session.run(*session.python, "-c", code, limit_s=2)
    wait_for(lambda: not Path(f"/proc/{mark.read_text()}").exists())


def test_programs_end_with_the_link(board: FakeBoard, tmp_path: Path) -> None:
    import subprocess

    mark = tmp_path / "pid"
    code = f"import os,time; open({str(mark)!r},'w').write(str(os.getpid())); time.sleep(60)"
    with opened(board) as session:
        child = subprocess.Popen(session.attached_command(*session.python, "-c", code))
        wait_for(lambda: mark.exists() and mark.read_text() != "")
        board.cut()
    child.wait(5)
    wait_for(lambda: not Path(f"/proc/{mark.read_text()}").exists())


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    import time

    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_program_starts_on_any_python_3() -> None:
    """Every Python 3 can parse the program, so that it can report a Python that is too old:
    tests/remote/test_faults.py.
    """
    source = shipped("targets") / "runtime" / "edgeq_board.py"
    ast.parse(source.read_text("utf-8"), feature_version=(3, 4))


def test_no_python(board: FakeBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices.toml").write_text('[devices.pi]\nhost = "pi"\npython = ["python9"]\n')
    with pytest.raises(BoardError, match="pi has no python9"), open_board(find_board("pi")):
        raise AssertionError


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R pi"),
        ("No ED25519 host key is known for pi\nHost key verification failed.", "not known yet"),
        ("pi@pi: Permission denied (publickey).", "ssh-copy-id pi"),
        ("ssh: connect to host pi port 22: Connection refused", "no SSH server listens"),
        ("ssh: connect to host pi port 22: Connection timed out", "cannot be reached"),
        ("ssh: Could not resolve hostname pi: Name or service not known", "there is no host pi"),
        ("kex_exchange_identification: \x1b[31mConnection closed", r"the link was cut \(kex.*closed\)"),
    ],
)
def test_a_board_that_is_not_reached(board: FakeBoard, says: str, line: str) -> None:
    board.fails(says)
    with pytest.raises(BoardError, match=line) as caught, opened(board):
        raise AssertionError
    assert str(caught.value).isprintable()


def test_a_full_disk(board: FakeBoard, payload: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(board) as session:
        session.send_runtime()
        real = session.ask

        def short(request, data=None):  # type: ignore[no-untyped-def]
            return {**real(request, data), **({"free": 100_000} if request["do"] == "listing" else {})}

        monkeypatch.setattr(session, "ask", short)
        with pytest.raises(
            BoardError, match=r"0\.3 MB must be sent, but only 0\.1 MB are free there.*edgeq device clean"
        ):
            session.send(payload)


def test_a_disk_that_fills_on_the_way(board: FakeBoard, payload: dict[str, Path]) -> None:
    """If a write fails, the protocol stays in step, and the part that was written is deleted."""
    board.python(f'ulimit -f 100; exec {sys.executable} "$@"')
    with opened(board) as session, pytest.raises(BoardError, match=r"File too large.*MB are free there"):
        session.send(payload)


def test_a_board_that_answers_nonsense(board: FakeBoard) -> None:
    board.python("echo welcome; cat")
    with pytest.raises(BoardError, match=r"not valid JSON.*prints text at login"), opened(board):
        raise AssertionError


def test_names_that_lead_out_of_its_folder_are_refused_there(board: FakeBoard, payload: dict[str, Path]) -> None:
    with opened(board) as session, pytest.raises(BoardError, match="not a plain path"):
        session.send({"../../out": payload["a.bin"]})
    assert not (board.home / "out").exists()


def test_session_type() -> None:
    assert BoardSession.__doc__


@pytest.mark.parametrize(
    ("name", "mode"),
    [(".", 0o777), (".", 0o770), ("..", 0o777), ("venv", 0o777), ("venv/bin", 0o775), ("board", 0o666)],
)
def test_nothing_runs_from_a_folder_that_others_of_the_board_can_write(board: FakeBoard, name: str, mode: int) -> None:
    with opened(board):
        pass
    (board.cache / "venv" / "bin").mkdir(mode=0o755, parents=True)
    mark = board.path / "ran"
    python = board.cache / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho >>{mark}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with opened(board):
        assert mark.exists()
    mark.unlink()
    place = next(board.cache.glob("board-*.py")) if name == "board" else board.cache / name
    before = place.stat().st_mode
    place.chmod(mode)
    with pytest.raises(BoardError, match=r"pi: other users can write to edgeq-device in the user's cache there"):
        opened(board).__enter__()
    assert not mark.exists()
    place.chmod(before)
    with opened(board):
        assert mark.exists()
