"""`edgeq detect --on` and `edgeq doctor --on`: what a board is, and whether models run right there."""

from __future__ import annotations

import numpy as np

from edgeq import demo
from edgeq.engines import load_engines
from edgeq.errors import BoardError, RuntimeUnavailableError
from edgeq.hardware.engines import detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.measure.comparison import decibels
from edgeq.pipeline.doctor import Check, Diagnosis, Status
from edgeq.pipeline.engine_checks import LEAST_DB
from edgeq.progress import SILENT, Progress
from edgeq.remote.devices import Board
from edgeq.remote.guest import BoardModels
from edgeq.remote.machine import Description, describe_board
from edgeq.remote.session import BoardSession, open_board
from edgeq.session import SessionSettings, open_session


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
