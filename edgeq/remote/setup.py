"""`edgeq device setup|clean|list`: a Python environment of its own on a board, and its removal with all else."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeq import demo
from edgeq.errors import BoardError, DataError, RuntimeUnavailableError
from edgeq.hardware.engines import detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.jobs.doctor import Check, Diagnosis, Status
from edgeq.jobs.engine_checks import LEAST_DB
from edgeq.measure.comparison import decibels
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.guest import BoardModels
from edgeq.remote.machine import Description, describe_board
from edgeq.remote.session import BoardSession, open_board
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, onnxruntime, open_session
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Count, parse

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
                *pip, "install", "--no-cache-dir", "-q", *options, "numpy", newest, limit_s=link.INSTALL_S
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


def detect_board(board: Board) -> Description:
    """What a board is; it needs neither numpy nor onnxruntime for that.

    Raises:
        BoardError: it cannot be used.
    """
    with open_board(board) as session:
        return describe_board(session)


def doctor_board(board: Board, *, progress: Progress = SILENT) -> Diagnosis:
    """Check a board: whether it is reached, what it has, and whether a model runs right there. Whatever is wrong is a
    check that failed."""
    checks: list[Check] = []
    try:
        with open_board(board) as session:
            checks.append(Check("SSH", "ok", f"{board.name} is reached; edgeq writes to {session.hello.folder} alone"))
            checks += _software(session)
            found = describe_board(session)
            match = match_profile(found.machine, load_profiles())
            checks.append(Check("profile", "ok", f"{match.profile.name}: {match.profile.title}"))
            checks.append(Check("state", "ok", found.state.text()))
            known = load_engines()
            for state in detect_engines(found.machine, known, found.engines):
                engine = known[state.name]
                there = state.version and not hardware_problem(engine, found.machine, state.version)
                broken = there and state.problem and not simulates(engine, found.machine)
                status: Status = "failed" if broken else "ok" if there else "absent"
                detail = state.problem or state.version or f"{state.title}: {state.install}"
                checks.append(Check(f"engine {state.name}", status, detail))
            checks.append(_runs(session, progress))
    except BoardError as error:
        checks.append(Check("kernels" if checks else "SSH", "failed", str(error)))
    return Diagnosis(tuple(checks))


def _software(session: BoardSession) -> list[Check]:
    private = ", which edgeq device setup made" if session.hello.private else ""
    found = [Check("Python", "ok", session.hello.python + private)]
    for name in ("numpy", "onnxruntime"):
        version = session.hello.modules.get(name)
        missing = f"edgeq device setup {session.board.name} installs it"
        found.append(Check(name, "failed" if version is None else "ok", missing if version is None else version))
    return found


def _runs(session: BoardSession, progress: Progress) -> Check:
    """The demo model on the board beside itself here."""
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    here = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    try:
        with BoardModels(session, progress) as models:
            there = models.open(demo.MODEL, SessionSettings()).run(None, feed)[0]
    except RuntimeUnavailableError as error:
        return Check("kernels", "failed", str(error))
    if there.shape != here.shape:
        return Check("kernels", "failed", f"the demo model answers in the shape {there.shape}, not {here.shape}")
    db = decibels(float((here**2).sum()), float(((there - here) ** 2).sum()))
    found = f"the demo model follows this machine's answers to {db:.1f} dB"
    return Check("kernels", "ok" if db >= LEAST_DB else "failed", found)
