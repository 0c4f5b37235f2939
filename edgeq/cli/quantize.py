"""edgeq quantize: one model, one target, one proven artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import ENGINE, PATH, build_options, target_option
from edgeq.registry import RECOVERIES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from edgeq.pipeline.quantize import Quantized


@click.command("quantize")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, metavar="OUT.onnx", help="The quantized model.")
@target_option(
    default="auto",
    help="auto, a target (`edgeq targets`), a profile (`edgeq profiles`), or a .toml file.",
    show_default=True,
)
@click.option(
    "--recover",
    multiple=True,
    metavar="METHOD",
    help=f"Accuracy recovery (docs/recover.md), repeatable: {', '.join(RECOVERIES.names())}.",
)
@click.option("--min-sqnr", type=float, metavar="DB", help="Keep layers in float until the outputs are so close.")
@ENGINE
@build_options
@common
def command(
    printer: Printer,
    model: Path,
    output: Path,
    target: str,
    recover: tuple[str, ...],
    min_sqnr: float | None,
    engine: str | None,
    **options: Any,
) -> None:
    """Quantize MODEL for a profile and prove the result.

    \b
    edgeq quantize model.onnx --data calib/ --preprocess imagenet -o int8.onnx
    edgeq quantize bert.onnx --data calib.npz --dynamic -o int8.onnx
    edgeq quantize model.onnx --data calib/ --recover bias-correction --min-sqnr 20 -o int8.onnx
    """
    from edgeq.engines import choose_engine
    from edgeq.pipeline.options import build_arguments
    from edgeq.pipeline.quantize import quantize
    from edgeq.tune.recover.standalone import recovering

    builder = recovering(*recover, min_sqnr_db=min_sqnr) if recover or min_sqnr is not None else None
    arguments = build_arguments(options)
    result = quantize(
        model,
        output=output,
        target=target,
        builder=builder,
        engine=choose_engine(engine) if engine else None,
        progress=printer.progress(),
        **arguments,
    )
    printer.result(result, lambda console: _draw(console, result, verbose=printer.verbose))


def _draw(console: Console, result: Quantized, *, verbose: bool) -> None:
    from edgeq.cli._proof import draw_decision, draw_proof

    scheme = result.scheme
    console.print(f"{result.output}: {scheme.title} for {result.target.title}")
    console.print(f"size {result.bytes_int8 / 1e6:.2f} MB, {result.bytes_int8 / result.bytes_float:.2f} of float32")
    draw_proof(console, result.proof, verbose=verbose)
    if result.decision is not None:
        draw_decision(console, result.decision, verbose=verbose)
    for kind in result.block_compute.kinds if result.block_compute is not None else ():
        console.print(f"products in blocks: {kind.summary()}")
    for key, value in result.session_options.items():
        console.print(f"run it with the session option {key}={value}")
    for note in result.notes:
        console.print(f"note: {note}")
    if verbose:
        console.print(_time_table(result.seconds))


def _time_table(seconds: Mapping[str, float]) -> Table:
    """Where the time went."""
    from rich.table import Column, Table

    table = Table("stage", Column("seconds", justify="right"), box=None)
    for title, taken in seconds.items():
        table.add_row(title, f"{taken:.2f}")
    table.add_row("all", f"{sum(seconds.values()):.2f}")
    return table
