"""`edgeq device setup|clean|list`: a Python environment of its own on a board, and its removal with all else."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import BoardError, DataError
from edgeq.progress import SILENT, Progress
from edgeq.records import Count, parse
from edgeq.remote import bounds
from edgeq.remote.devices import Board
from edgeq.remote.session import BoardSession, open_board
from edgeq.session import onnxruntime

_PACKAGES = ("numpy", "onnxruntime")


@dataclass(frozen=True)
class DeviceSetUp:
    """A board with an environment of its own: its folder, and the versions that are in it."""

    device: str
    folder: str
    python: str
    numpy: str
    onnxruntime: str

    def lines(self) -> list[str]:
        """For people."""
        versions = f"Python {self.python}, numpy {self.numpy}, onnxruntime {self.onnxruntime}"
        return [f"{self.device}: {versions} in {self.folder}/venv"]


@dataclass(frozen=True)
class DeviceCleaned:
    """A board that nothing of edgeq's is on any more, and the bytes that it took."""

    device: str
    folder: str
    bytes: Count

    def lines(self) -> list[str]:
        """For people."""
        return [f"{self.device}: {self.folder} is removed ({self.bytes / 1e6:.1f} MB)"]


@dataclass(frozen=True)
class _Removed:
    bytes: Count


def set_up(board: Board, *, wheels: Path | None = None, progress: Progress = SILENT) -> DeviceSetUp:
    """Make an environment with numpy and the newest onnxruntime that is not newer than the one here.

    Args:
        wheels: a folder of wheels to install from, for a board whose pip reaches no index.

    Raises:
        BoardError: it cannot be made; what to install there, or to copy.
        DataError: there are no wheels in the folder.
    """
    with open_board(board) as session:
        folder = session.hello.folder
        with progress.stage(f"making an environment on {board.name}"):
            _make(session, f"{folder}/venv")
            options = _options(session, wheels, progress)
            pip = (f"{folder}/venv/bin/python", "-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
            newest = f"onnxruntime<={onnxruntime().__version__}"
            code, _, last = session.run(
                *pip, "install", "--no-cache-dir", "-q", *options, "numpy", newest, limit_s=bounds.INSTALL_S
            )
        if code:
            session.run("rm", "-rf", f"{folder}/venv", limit_s=60)
            raise BoardError(f"{board.name}: pip failed: {last}", _what_to_copy(session, newest))
    with open_board(board) as session:
        session.require(*_PACKAGES)
        return DeviceSetUp(board.name, folder, session.hello.python, **{n: session.hello.modules[n] for n in _PACKAGES})


def clean(board: Board) -> DeviceCleaned:
    """Remove everything that edgeq keeps on a board.

    Raises:
        BoardError: it cannot be reached, or somebody uses it.
    """
    with open_board(board) as session:
        found = parse(session.ask({"do": "clean"}), _Removed, board.name, BoardError)
        return DeviceCleaned(board.name, session.hello.folder, found.bytes)


def _make(session: BoardSession, place: str) -> None:
    code, out, last = session.run(*session.board.python, "-I", "-m", "venv", "--clear", place, limit_s=600)
    if code == 0:
        return
    session.run("rm", "-rf", place, limit_s=60)
    text = " ".join((out.decode("utf-8", "replace") + last).split())
    missing = "ensurepip" in text or "No module named venv" in text
    raise BoardError(
        f"{session.board.name}: its Python makes no environments ({text[:200] if not missing else 'venv is missing'})",
        "Install python3-venv there, or numpy and onnxruntime for the Python itself",
    )


def _options(session: BoardSession, wheels: Path | None, progress: Progress) -> tuple[str, ...]:
    if wheels is None:
        return ()
    files = {file.name: file for file in sorted(wheels.glob("*.whl"))}
    if not files:
        raise DataError(f"{wheels} holds no wheels", "Get them with pip download")
    return "--no-index", "--find-links", session.send(files, keep=False, progress=progress)


def _what_to_copy(session: BoardSession, newest: str) -> str:
    code, machine, _ = session.run("uname", "-m", limit_s=30)
    kind = "".join(c for c in machine.decode("utf-8", "replace") if c.isalnum() or c == "_") if code == 0 else "MACHINE"
    version = ".".join(session.hello.python.split(".")[:2])
    get = f"pip download --only-binary :all: --platform manylinux_2_28_{kind} --python-version {version}"
    again = f"edgeq device setup {shlex.quote(session.board.name)} --wheels wheels"
    return f"If it reaches no package index: {get} numpy '{newest}' -d wheels here, then {again}"
