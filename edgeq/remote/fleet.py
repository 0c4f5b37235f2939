"""`edgeq bench --on FLEET.toml`: one benchmark on many boards at once. A board that fails is a row, not an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from edgeq.errors import BoardError, EdgeqError
from edgeq.measure.latency import Measurement
from edgeq.progress import Advance
from edgeq.records import parse, plain
from edgeq.remote.bench import BoardBench
from edgeq.remote.devices import Board
from edgeq.remote.session import open_board
from edgeq.report.fleet import FleetRecord, FleetRow, board_table, failures, kind_table, summarised
from edgeq.report.timing import BenchReport

OnStatus = Callable[[str, str], None]
"""Called with a board's name and what it is doing, from several threads."""
_AT_ONCE = 64


@dataclass(frozen=True)
class Fleet:
    """What a benchmark found on a fleet."""

    found: FleetRecord

    def check(self) -> None:
        """Raise BoardError where no board gave figures."""
        if all(row.reason for row in self.found.boards):
            raise BoardError(f"no board could be measured: {self.found.boards[0].reason}")

    def __record__(self) -> FleetRecord:
        return self.found

    def tables(self) -> Iterator[tuple[Sequence[str], list[Sequence[str]]]]:
        """For people: heads and rows, first by board, then by kind."""
        yield board_table(self.found)
        if self.found.kinds:
            yield kind_table(self.found)

    def lines(self) -> list[str]:
        """What the tables do not hold: why boards failed, and what may have disturbed the others."""
        notes = [f"{board.name}: {note}" for board in self.found.boards for note in board.notes]
        return [*failures(self.found), *notes]


def measure_fleet(boards: Sequence[Board], run: Callable[..., Measurement], on_status: OnStatus) -> Fleet:
    """Run a benchmark on all boards, in parallel; its first scenario is what is compared.

    Args:
        run: `edgeq.measure.bench.bench`, of what is to be measured.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(boards))) as pool:
        rows, scenarios = zip(*pool.map(lambda board: _row(board, run, on_status), boards), strict=True)
    return Fleet(summarised(rows, next(filter(None, scenarios), "")))


def _row(board: Board, run: Callable[..., Measurement], on_status: OnStatus) -> tuple[FleetRow, str]:
    progress = _BoardProgress(board.name, on_status)
    try:
        with progress.stage("connecting"), open_board(board) as session:
            found = run(place=BoardBench(session, progress), progress=progress)
    except EdgeqError as error:
        on_status(board.name, f"failed: {error.problem}")
        return FleetRow(board.name, board.kind, reason=str(error)), ""
    on_status(board.name, "done")
    name, scenario = next(iter(parse(plain(found), BenchReport, board.name, BoardError).scenarios.items()))
    latency = {model: entry.latency for model, entry in scenario.models.items()}
    cpu = str(found.machine.get("cpu", ""))
    return FleetRow(board.name, board.kind, "", cpu, latency, scenario.ratios, (*progress.notes, *found.notes)), name


class _BoardProgress:
    """Progress of one board among many: its stage is its status."""

    def __init__(self, name: str, on_status: OnStatus) -> None:
        self._name = name
        self._on_status = on_status
        self.notes: list[str] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """See `Progress.stage`."""
        del total
        self._on_status(self._name, title)
        yield lambda steps: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.notes.append(text)
