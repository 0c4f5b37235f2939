"""`edgeq device`: the boards that are known, an environment on one, and its removal."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._next import fill_next
from edgeq.cli._options import PATH, complete_board

BOARD = click.argument("board", metavar="BOARD", shell_complete=complete_board)


@click.group("device")
def command() -> None:
    """Boards over SSH: list them, make an environment on one, remove what edgeq keeps there."""


@command.command("list")
@common
def listed(printer: Printer) -> None:
    """List the boards of the user's devices.toml and of the one in this folder."""
    from edgeq.remote.devices import known_boards

    boards = known_boards()
    lines = [f"{b.name}: {b.user + '@' if b.user else ''}{b.host}, of the kind {b.kind}" for b in boards.values()]
    fill_next(board=next(iter(boards), None))
    printer.lines({"devices": boards}, lines or ["no devices.toml names a board; see docs/boards.md"])


@command.command()
@BOARD
@click.option("--wheels", type=PATH, metavar="DIR", help="Install from these wheels, not from an index.")
@common
def setup(printer: Printer, board: str, wheels: Path | None) -> None:
    """Make a Python environment with numpy and onnxruntime in edgeq's folder on BOARD.

    \b
    edgeq device setup ssh://pi@10.0.0.5
    edgeq device setup pi5 --wheels wheels/
    """
    from edgeq.remote.devices import one_board
    from edgeq.remote.machine import set_up

    found = set_up(one_board(board), wheels=wheels, progress=printer.progress())
    printer.lines(found, found.lines())


@command.command()
@BOARD
@common
def clean(printer: Printer, board: str) -> None:
    """Remove everything that edgeq keeps on BOARD: bundles, its programs, the environment."""
    from edgeq.remote.devices import one_board
    from edgeq.remote.machine import clean as remove

    found = remove(one_board(board))
    printer.lines(found, found.lines())
