"""Run one benchmark on many boards in parallel, and compare their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from edgeq.errors import BoardError, EdgeqError
from edgeq.measure.latency import Measurement
from edgeq.remote.bench import BoardBench
from edgeq.remote.devices import Board
from edgeq.remote.session import open_board
from edgeq.reporting.timing import BenchReport, FleetRecord, FleetRow, summarise_boards
from edgeq.util.display import Advance
from edgeq.util.records import parse, plain

OnStatus = Callable[[str, str], None]
"""A function that receives a board's name and its current activity. Several threads call it."""
# Each board takes a thread and an ssh process here. More boards than this wait their turn.
_AT_ONCE = 64


def measure_fleet(boards: Sequence[Board], run: Callable[..., Measurement], on_status: OnStatus) -> FleetRecord:
    """Run a benchmark on all boards in parallel, and compare the boards' results in the first scenario.

    Args:
        run: `edgeq.measure.bench.bench`, with the models to measure already bound.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(boards))) as pool:
        rows, scenarios = zip(*pool.map(lambda board: _measure_board(board, run, on_status), boards), strict=True)
    return summarise_boards(rows, next(filter(None, scenarios), ""))


def _measure_board(board: Board, run: Callable[..., Measurement], on_status: OnStatus) -> tuple[FleetRow, str]:
    progress = _BoardProgress(board.name, on_status)
    try:
        with progress.stage("connecting"), open_board(board) as session:
            measured = run(place=BoardBench(session, progress), progress=progress)
    # One broken board must not end the measurement of the others.
    except EdgeqError as error:
        on_status(board.name, f"failed: {error.problem}")
        return FleetRow(board.name, board.kind, reason=error.text), ""
    on_status(board.name, "done")
    name, scenario = next(iter(parse(plain(measured), BenchReport, board.name, BoardError).scenarios.items()))
    latency = {model: entry.latency for model, entry in scenario.models.items()}
    cpu = str(measured.machine.get("cpu_name", ""))
    return FleetRow(board.name, board.kind, "", cpu, latency, scenario.ratios, (*progress.notes, *measured.notes)), name


class _BoardProgress:
    """Report the progress of one board among several. The status of the board is its current stage."""

    def __init__(self, name: str, on_status: OnStatus) -> None:
        self._name = name
        self._on_status = on_status
        self.notes: list[str] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Show the stage as the board's status. See `Progress.stage`."""
        del total
        self._on_status(self._name, title)
        yield lambda steps: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.notes.append(text)
