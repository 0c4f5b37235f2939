"""Evaluate models on a board, and hold them to a gate. Each result includes the board's machine and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.measure.bench import Workload
from edgeq.measure.evaluation import EvalRequest, EvalResult, run_evaluation
from edgeq.measure.latency import Measurement
from edgeq.measure.loaded_model import LoadedModel
from edgeq.remote.bench import BoardBench
from edgeq.remote.devices import Board
from edgeq.remote.machine import describe_board, record_board
from edgeq.remote.session import BoardModels, open_board
from edgeq.reporting.compare import CompareRequest
from edgeq.reporting.gate import Gated, GateLimits, gate
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import marked


@dataclass(frozen=True)
class BoardEvaluated:
    """Hold an evaluation, together with the board's machine and state as plain values."""

    result: EvalResult
    board: Mapping[str, Any]

    def __record__(self) -> dict[str, Any]:
        return {**marked(self.result), "board": self.board}


def evaluate_board(request: EvalRequest, board: Board, *, progress: Progress = SILENT) -> BoardEvaluated:
    """Run a model or bundle on a board, and return its accuracy or its agreement with a reference that runs on this
    machine.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `run_evaluation` raises.
    """
    with open_board(board) as session:
        initial = describe_board(session)
        with BoardModels(session, progress) as models:
            result = run_evaluation(request, opener=models, progress=progress)
        # The state after the run is read while the lock is still held, so it belongs to this run.
        return BoardEvaluated(result, record_board(session, initial, describe_board(session)))


class _BoardPlace(BoardModels):
    """Measure models for a comparison on a board. See `edgeq.reporting.compare.ComparePlace`."""

    @property
    def name(self) -> str:
        """Return the board's name in `devices.toml`."""
        return self._session.board.name

    def measure(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Time the models on the board. See `edgeq.reporting.compare.ComparePlace`."""
        return BoardBench(self._session, self._progress).loaded(models, sessions, work)


def run_gate(
    board: Board, request: CompareRequest, limits: GateLimits, *, update: bool = False, progress: Progress = SILENT
) -> Gated:
    """Run `edgeq.reporting.gate.gate` on a board. If there is no baseline to compare with, do not connect to the board.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `gate` raises.
    """
    # Without a baseline, the gate only records, or refuses to, and needs no board for that.
    if not request.a.exists():
        return gate(request, limits, update=update, progress=progress)
    with open_board(board) as session, _BoardPlace(session, progress) as place:
        return gate(request, limits, update=update, place=place, progress=progress)
