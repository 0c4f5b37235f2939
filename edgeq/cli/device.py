"""Implement `edgeq device` and `emulate`, for boards over SSH and emulated machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.cli._common import Printer, command
from edgeq.cli._next import fill_next
from edgeq.cli._options import FORCE, OUTPUT, PATH, board_of, complete_board, target_option

BOARD = click.argument("board", metavar="BOARD", shell_complete=complete_board)


@click.group("device")
def device_command() -> None:
    """List boards, prepare a board over SSH, report what it measures, remove edgeq's files from it, or make emulated
    machines.
    """


@command("list", within=device_command)
def list_boards(printer: Printer) -> None:
    """List the boards in your devices.toml and in this folder's devices.toml."""
    from edgeq.remote.devices import load_boards

    boards = load_boards()
    lines = [f"{b.name}: {b.user + '@' if b.user else ''}{b.host}, of the kind {b.kind}" for b in boards.values()]
    fill_next(board=next(iter(boards), None))
    printer.lines({"devices": boards}, lines or ["no devices.toml names a board; see docs/boards.md"])


@command("setup", within=device_command, installs=lambda given: f"installs numpy and onnxruntime on {given['board']}")
@BOARD
@click.option("--wheels", type=PATH, metavar="DIR", help="Install from the wheels in this folder, not from an index.")
def set_board_up(printer: Printer, board: str, wheels: Path | None) -> None:
    """Make a Python environment with numpy and onnxruntime in edgeq's folder on BOARD.

    \b
    edgeq device setup ssh://pi@10.0.0.5
    edgeq device setup pi5 --wheels wheels/
    """
    from edgeq.remote.setup import set_up

    setup = set_up(board_of(board), wheels=wheels, progress=printer.progress())
    printer.lines(setup, setup.lines())


@command("clean", within=device_command)
@BOARD
def clean_board(printer: Printer, board: str) -> None:
    """Remove everything that edgeq keeps on BOARD: bundles, programs and the Python environment."""
    from edgeq.remote.setup import clean

    removal = clean(board_of(board))
    printer.lines(removal, removal.lines())


@command("report", within=device_command)
@BOARD
@click.argument("bundle", type=PATH, required=False)
@click.option(
    "-o",
    "--output",
    type=OUTPUT,
    default="board-report.json",
    show_default=True,
    metavar="FILE.json",
    help="Path of the report.",
)
@target_option(help="Target that the board is, or a profile. [default: by the board's name, else its profile]")
@click.option("--duration", type=float, metavar="S", help="Minimum time for each model, in seconds. [default: 2]")
@FORCE
def report_on_board(printer: Printer, board: str, duration: float | None, **options: Any) -> None:
    """Check and time edgeq's demo model on BOARD, and BUNDLE if you give one, and write the figures to a file.

    The file has figures, versions and names of hardware, but no names of users or machines, addresses, paths or serial
    numbers.

    \b
    edgeq device report ssh://pi@10.0.0.5
    edgeq device report pi5 dist/ -o pi5.json
    """
    from edgeq_device.measure.bench_settings import parse_settings

    from edgeq.jobs.board_report import report_board
    from edgeq.util.device_errors import device_errors

    with device_errors():
        settings = parse_settings(duration=duration)
    reported = report_board(board_of(board), settings=settings, progress=printer.progress(), **options)
    printer.lines(reported, reported.lines())
    reported.check()


@click.group("emulate")
def emulate_command() -> None:
    """Run other machines' kernels on this machine, to check bundles before they are deployed."""


device_command.add_command(emulate_command)


@command(
    "setup",
    within=emulate_command,
    installs=lambda given: f"downloads packages for the emulated machine {given['machine']}, and starts it",
)
@click.argument("machine", metavar="NAME", default="arm64")
@click.option(
    "--sysroot", type=PATH, metavar="DIR", help="Use this root file system, which must contain Python and onnxruntime."
)
@click.option(
    "--onnxruntime", metavar="VERSION", help="Version of onnxruntime to install. [default: the one installed here]"
)
@click.option("--sources", type=PATH, metavar="FILE", help="Use this apt sources file instead of the system's.")
@click.option("--force", is_flag=True, help="Make the machine again.")
def set_machine_up(printer: Printer, machine: str, **options: Any) -> None:
    """Create an emulated arm64 machine in your cache folder. This needs no root access and changes nothing else.

    \b
    edgeq emulate setup arm64
    edgeq emulate setup arm64 --sysroot /path/to/a/root/file/system
    """
    from edgeq.emulate.routes import setup

    result = setup(machine, progress=printer.progress(), **options)
    printer.lines(result, result.lines())


@command("status", within=emulate_command)
def show_status(printer: Printer) -> None:
    """Show the targets whose kernels run here, how they run, and what is missing for the others."""
    from edgeq.backends.base import SIMULATORS
    from edgeq.emulate.routes import read_status

    result = read_status(SIMULATORS)
    printer.lines(result, result.lines(verbose=printer.verbose))
