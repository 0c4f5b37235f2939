"""`edgeq eval --on`: the model runs on the board, on samples that are prepared here; a reference runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeq.measure.evaluation import EvalRequest, EvalResult, run_evaluation
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.remote.devices import Board
from edgeq.remote.guest import BoardModels
from edgeq.remote.machine import board_record, describe_board
from edgeq.remote.session import open_board


@dataclass(frozen=True)
class BoardEvaluated:
    """An evaluation, and what the board is and was doing (plain values)."""

    result: EvalResult
    board: Mapping[str, Any]

    def __record__(self) -> dict[str, Any]:
        return {**plain(self.result), "board": self.board}


def evaluate_on(request: EvalRequest, board: Board, *, progress: Progress = SILENT) -> BoardEvaluated:
    """Accuracy of a model or bundle on a board, or its agreement with a reference here.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: as `run_evaluation`.
    """
    with open_board(board) as session:
        before = describe_board(session)
        with BoardModels(session, progress) as models:
            result = run_evaluation(request, opener=models, progress=progress)
        return BoardEvaluated(result, board_record(session, before, describe_board(session)))
