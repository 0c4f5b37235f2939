"""`edgeq gate --on`: the model and the baseline run on a board; what is allowed is decided here."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.measure.bench import Workload
from edgeq.measure.latency import Measurement
from edgeq.measure.loaded_model import LoadedModel
from edgeq.progress import SILENT, Progress
from edgeq.remote.bench import BoardBench
from edgeq.remote.devices import Board
from edgeq.remote.guest import BoardModels
from edgeq.remote.session import open_board
from edgeq.report.compare import CompareRequest
from edgeq.report.gate import Gated, GateLimits, gate


class _BoardPlace(BoardModels):
    """See `edgeq.report.compare.ComparePlace`."""

    @property
    def name(self) -> str:
        """The board's, as `devices.toml` has it."""
        return self._session.board.name

    def measure(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Time the models on the board. See `edgeq.report.compare.ComparePlace`."""
        return BoardBench(self._session, self._progress).loaded(models, sessions, work)


def gate_on(
    board: Board, request: CompareRequest, limits: GateLimits, *, update: bool = False, progress: Progress = SILENT
) -> Gated:
    """`edgeq.report.gate.gate` on a board, which is not reached where there is no baseline to measure against.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: as `gate`.
    """
    if not request.a.exists():
        return gate(request, limits, update=update, progress=progress)
    with open_board(board) as session, _BoardPlace(session, progress) as place:
        return gate(request, limits, update=update, place=place, progress=progress)
