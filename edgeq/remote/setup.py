"""Make edgeq's private environment on a board, and remove everything that edgeq keeps there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeq.errors import BoardError, DataError, one_line
from edgeq.hardware.engines import detect_engines
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.machine import Description, describe_board
from edgeq.remote.session import BoardSession, open_board
from edgeq.run.engines import load_engines
from edgeq.run.session import onnxruntime
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Count, parse

_PACKAGES = ("numpy", "onnxruntime")


@dataclass(frozen=True)
class DeviceSetUp:
    """Report the private environment on a board, with its folder and its versions.

    Attributes:
        engines: the packages to install for other hardware of the board.
    """

    device: str
    folder: str
    python: str
    numpy: str
    onnxruntime: str
    engines: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return lines of text that describe the result to the user."""
        versions = f"Python {self.python}, numpy {self.numpy}, onnxruntime {self.onnxruntime}"
        return [f"{self.device}: {versions} in {self.folder}/venv", *self.engines]


@dataclass(frozen=True)
class DeviceCleaned:
    """Report that edgeq's folder was removed from a board.

    Attributes:
        bytes: size of the removed folder.
    """

    device: str
    folder: str
    bytes: Count

    def lines(self) -> list[str]:
        """Return lines of text that describe the result to the user."""
        return [f"{self.device}: {self.folder} is removed ({self.bytes / 1e6:.1f} MB)"]


def set_up(board: Board, *, wheels: Path | None = None, progress: Progress = SILENT) -> DeviceSetUp:
    """Make an environment with numpy and onnxruntime on a board.

    The environment gets the newest onnxruntime that is not newer than the onnxruntime on this machine.

    Args:
        wheels: a folder of wheels to install from, if the board's pip cannot reach a package index.

    Raises:
        BoardError: the environment cannot be made; the message names the packages or files to install or copy.
        DataError: there are no wheels in the folder.
    """
    with open_board(board) as session:
        folder = session.hello.folder
        with progress.stage(f"making an environment on {board.name}"):
            _make_environment(session, f"{folder}/venv")
            options: tuple[str, ...] = ()
            if wheels is not None:
                files = {file.name: file for file in sorted(wheels.glob("*.whl"))}
                if not files:
                    raise DataError(f"{wheels} has no wheels", "Get them with pip download")
                options = "--no-index", "--find-links", session.send(files, keep=False, progress=progress)
            pip = (f"{folder}/venv/bin/python", "-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
            # A newer runtime than the one here could read or compute a model in another way than was tested.
            newest = f"onnxruntime<={onnxruntime().__version__}"
            code, _, error_line = session.run(
                *pip, "install", "--no-cache-dir", "-q", *options, "numpy", newest, limit_s=link.INSTALL_S
            )
        if code:
            # A half-made environment would be taken for a complete one at the next connection.
            session.run("rm", "-rf", f"{folder}/venv", limit_s=60)
            raise BoardError(f"{board.name}: pip failed: {error_line}", _wheels_hint(session, newest))
    # A new session starts with the new environment, so its versions are those that models will get.
    with open_board(board) as session:
        session.require(*_PACKAGES)
        description = describe_board(session)
        versions = {name: session.hello.modules[name] for name in _PACKAGES}
        return DeviceSetUp(
            board.name, folder, session.hello.python, **versions, engines=tuple(_list_missing_packages(description))
        )


def _list_missing_packages(description: Description) -> Iterator[str]:
    """Yield the package to install for each engine that the board has hardware for, judged by the board's name."""
    engines = load_engines()
    for state in detect_engines(description.machine, engines, description.engines):
        if engines[state.name].boards and not state.version:
            yield f"for {state.title}: {state.install}. {engines[state.name].driver}"


def clean(board: Board) -> DeviceCleaned:
    """Remove everything that edgeq keeps on a board.

    Raises:
        BoardError: the board cannot be reached, or somebody is using it.
    """
    with open_board(board) as session:
        place = {"device": board.name, "folder": session.hello.folder}
        return parse({**session.ask({"do": "clean"}), **place}, DeviceCleaned, board.name, BoardError)


def _make_environment(session: BoardSession, place: str) -> None:
    code, out, error_line = session.run(*session.board.python, "-I", "-m", "venv", "--clear", place, limit_s=600)
    if code == 0:
        return
    session.run("rm", "-rf", place, limit_s=60)
    text = one_line(out.decode("utf-8", "replace") + error_line)
    # Debian and Ubuntu have venv in a package of its own, so its absence gets an answer of its own.
    missing = "ensurepip" in text or "No module named venv" in text
    reason = "venv is missing" if missing else one_line(text, most=200)
    raise BoardError(
        f"{session.board.name}: its Python makes no environment ({reason})",
        "Install python3-venv there, or install numpy and onnxruntime for that Python",
    )


def _wheels_hint(session: BoardSession, newest: str) -> str:
    code, machine, _ = session.run("uname", "-m", limit_s=30)
    # The text comes from the board and becomes part of a command that the user may copy.
    kind = "".join(c for c in machine.decode("utf-8", "replace") if c.isalnum() or c == "_") if code == 0 else "MACHINE"
    version = ".".join(session.hello.python.split(".")[:2])
    get = f"pip download --only-binary :all: --platform manylinux_2_28_{kind} --python-version {version}"
    retry = f"edgeq device setup {shlex.quote(session.board.name)} ⟨wheels⟩ wheels"
    return f"If it reaches no package index: {get} numpy '{newest}' -d wheels here, then {retry}"
