"""edgeq bench: latency and throughput of a model or a bundle."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, table, watched_console
from edgeq.cli._options import ENGINE_HELP, OWN_PREPROCESS, PATH, SESSION_OPTIONS, THREADS, VARIANT, complete_board

if TYPE_CHECKING:
    from edgeq.measure.latency import Measurement
    from edgeq.remote.devices import Board
    from edgeq.remote.jobs import Fleet


@click.command("bench")
@click.argument("model", type=PATH, metavar="MODEL|BUNDLE")
@click.option("--against", type=PATH, help="Compare with this model, measured interleaved.")
@VARIANT
@click.option("--engine", "engines", multiple=True, metavar="ENGINE", help=f"{ENGINE_HELP} Repeatable: compares them.")
@click.option(
    "--scenario",
    type=click.Choice(["single-stream", "multi-stream", "server", "offline", "all"]),
    default="single-stream",
    show_default=True,
    help="MLPerf's scenarios: what a query is, and when it comes.",
)
@THREADS
@SESSION_OPTIONS
@click.option("--pin", metavar="CORES", help="Run on these cores only, such as 0,2-3.")
@click.option("--duration", type=float, metavar="S", help="Seconds at least for each model. [2]")
@click.option("--official", is_flag=True, help="MLPerf's official duration: 600 seconds.")
@click.option(
    "--queries", "min_queries", type=int, default=100, show_default=True, help="Queries at least, each model."
)
@click.option("--data", "source", help="Samples to run: a folder, .npz, .npy, .pb ... Else inputs are made up.")
@OWN_PREPROCESS
@click.option("--count", type=click.IntRange(min=1), help="Samples of --data at most. [32]")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=SIZES", help="Of a made-up input: x=1,3,224,224.")
@click.option("--batch", type=int, default=1, show_default=True, help="Samples a run (offline, multi-stream).")
@click.option("--qps", "target_qps", type=float, help="Server: arrival rate. Else the highest that holds is searched.")
@click.option("--latency-bound", "latency_bound_ms", type=float, metavar="MS", help="Server: on p99. [10 x p50]")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of sample order, interleaving and arrivals.")
@click.option(
    "--on",
    multiple=True,
    metavar="BOARD|FLEET.toml",
    shell_complete=complete_board,
    help="Measure on this board: ssh://user@host[:port], a name of devices.toml, or a file of boards. Repeatable.",
)
@common
def command(
    printer: Printer,
    on: tuple[str, ...],
    model: Path,
    against: Path | None,
    variant: str | None,
    engines: tuple[str, ...],
    source: str | None,
    preprocess: str | None,
    count: int | None,
    shapes: tuple[str, ...],
    session_options: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure latency and throughput of a model or a bundle on this machine.

    A bundle's quantized model is measured interleaved with its float32 one. With -v the distributions are drawn.

    \b
    edgeq bench int8.onnx --against float.onnx --data val/ --preprocess imagenet
    edgeq bench bundle/ --scenario all --pin 0-3
    edgeq bench int8.onnx --engine onnxruntime --engine openvino
    edgeq bench bundle/ --on ssh://pi@10.0.0.5
    edgeq bench bundle/ --on fleet.toml
    """
    from edgeq_device.arrays import parse_shapes
    from edgeq_device.bench import bench_lines, parse_settings
    from edgeq_device.relay import printable

    from edgeq.measure.bench import BenchData, bench
    from edgeq.run.engines import choose_engine
    from edgeq.run.session import given_options
    from edgeq.util.resources import device_errors

    with device_errors():
        settings = parse_settings(**options)
        data = BenchData(source, preprocess, count, parse_shapes(shapes))
    run = functools.partial(
        bench,
        model,
        against=against,
        variant=variant,
        engines=[choose_engine(text) for text in engines],
        data=data,
        settings=settings,
        session_options=given_options(session_options),
    )
    if on:
        from edgeq.remote.devices import fleet_of
        from edgeq.remote.jobs import bench_on

        boards = fleet_of(on)
        if len(boards) > 1:
            fleet = _on_fleet(printer, boards, run)
            printer.lines(fleet, _draw_fleet(fleet))
            fleet.check()
            return
        found = bench_on(boards[0], run, progress=printer.progress())
    else:
        found = run(progress=printer.progress())
    lines = bench_lines(found.report, verbose=printer.verbose)
    printer.result(found, lambda: click.echo("\n".join(map(printable, lines))))


def _on_fleet(printer: Printer, boards: Sequence[Board], run: Callable[..., Measurement]) -> Fleet:
    """Measure on all boards, with what each is doing in one table on a terminal."""
    from edgeq.remote.jobs import measure_fleet

    if printer.quiet or not sys.stderr.isatty():
        return measure_fleet(boards, run, lambda name, status: None)
    from edgeq_device.relay import printable
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    doing = {board.name: "waiting" for board in boards}

    def drawn() -> Table:
        """The boards with what each is doing now."""
        table = Table("board", "status")
        for name, status in list(doing.items()):
            table.add_row(Text(printable(name)), Text(printable(status)))
        return table

    with Live(console=watched_console(), get_renderable=drawn, transient=True):
        return measure_fleet(boards, run, doing.__setitem__)


def _draw_fleet(fleet: Fleet) -> Lines:
    yield from (table(*one) for one in fleet.tables())
    yield from fleet.lines()
