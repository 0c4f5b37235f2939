"""Check a board from end to end: its connection, its software, its engines, and one model."""

from __future__ import annotations

import numpy as np

from edgeq import demo
from edgeq.backends.base import DoctorCheck, Status
from edgeq.errors import BoardError, RuntimeUnavailableError
from edgeq.hardware.engines import detect_engines, hardware_problem, simulates
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.measure.power_ratios import decibels
from edgeq.prove.engine_check import LEAST_DB, EngineDiagnosis
from edgeq.remote.devices import Board
from edgeq.remote.machine import describe_board
from edgeq.remote.session import BoardModels, BoardSession, open_board
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Progress


def doctor_board(board: Board, *, progress: Progress = SILENT) -> EngineDiagnosis:
    """Check the connection to a board, its software, its engines, and whether a model runs correctly on it.

    Each problem is reported as a failed check.
    """
    checks: list[DoctorCheck] = []
    try:
        with open_board(board) as session:
            checks.append(
                DoctorCheck("SSH", "ok", f"{board.name} is reached; edgeq writes only to {session.hello.folder}")
            )
            checks += _check_software(session)
            description = describe_board(session)
            match = match_profile(description.machine, load_profiles())
            checks.append(DoctorCheck("profile", "ok", f"{match.profile.name}: {match.profile.title}"))
            checks.append(DoctorCheck("state", "ok", description.state.text()))
            engines = load_engines()
            for state in detect_engines(description.machine, engines, description.engines):
                engine = engines[state.name]
                # An engine for hardware that the board lacks is absent, whether its package is there or not.
                available = state.version and not hardware_problem(engine, description.machine, state.version)
                broken = available and state.problem and not simulates(engine, description.machine)
                status: Status = "failed" if broken else "ok" if available else "absent"
                detail = state.problem or state.version or f"{state.title}: {state.install}"
                checks.append(DoctorCheck(f"engine {state.name}", status, detail))
            checks.append(_check_kernels(session, progress))
    # The checks before the failure are still worth reading, so the error becomes the last line.
    except BoardError as error:
        checks.append(DoctorCheck("kernels" if checks else "SSH", "failed", error.text))
    return EngineDiagnosis(tuple(checks))


def _check_software(session: BoardSession) -> list[DoctorCheck]:
    private = ", which edgeq device setup made" if session.hello.private else ""
    checks = [DoctorCheck("Python", "ok", session.hello.python + private)]
    for name in ("numpy", "onnxruntime"):
        version = session.hello.modules.get(name)
        missing = f"edgeq device setup {session.board.name} installs it"
        checks.append(DoctorCheck(name, "failed" if version is None else "ok", missing if version is None else version))
    return checks


def _check_kernels(session: BoardSession, progress: Progress) -> DoctorCheck:
    """Compare the demo model's outputs on the board with those on this machine."""
    # The demo model is part of every installation, so no data of the user are needed for the comparison.
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:8]}
    local_output = open_session(demo.MODEL).run(None, feed)[0].astype(np.float64)
    try:
        with BoardModels(session, progress) as models:
            board_output = models.open(demo.MODEL, SessionSettings()).run(None, feed)[0]
    except RuntimeUnavailableError as error:
        return DoctorCheck("kernels", "failed", error.text)
    # A broadcast between other shapes would give a figure that means nothing.
    if board_output.shape != local_output.shape:
        return DoctorCheck(
            "kernels", "failed", f"the demo model's output has the shape {board_output.shape}, not {local_output.shape}"
        )
    db = decibels(float((local_output**2).sum()), float(((board_output - local_output) ** 2).sum()))
    detail = f"the demo model matches this machine's outputs to {db:.1f} dB"
    return DoctorCheck("kernels", "ok" if db >= LEAST_DB else "failed", detail)
