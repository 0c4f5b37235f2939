"""edgeq quantize: one model, one target, one proven artifact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, table
from edgeq.cli._options import ENGINE, OUTPUT, PATH, build_options, target_option
from edgeq.util.registry import RECOVERIES

if TYPE_CHECKING:
    from edgeq.jobs.quantize import Quantized


@click.command("quantize")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="OUT.onnx", help="The quantized model.")
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
    from edgeq.jobs.job import build_arguments
    from edgeq.jobs.quantize import quantize
    from edgeq.run.engines import choose_engine
    from edgeq.tune.recover.closer import recovering

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
    printer.lines(result, _draw(result, verbose=printer.verbose))


def _draw(result: Quantized, *, verbose: bool) -> Lines:
    from edgeq.cli._proof import draw_decision, draw_proof

    scheme = result.scheme
    yield f"{result.output}: {scheme.title} for {result.target.title}"
    yield f"size {result.bytes_int8 / 1e6:.2f} MB, {result.bytes_int8 / result.bytes_float:.2f} of float32"
    yield from draw_proof(result.proof, verbose=verbose)
    if result.decision is not None:
        yield from draw_decision(result.decision, verbose=verbose)
    for kind in result.block_compute.kinds if result.block_compute is not None else ():
        yield f"products in blocks: {kind.summary()}"
    for key, value in result.session_options.items():
        yield f"run it with the session option {key}={value}"
    yield from (f"note: {note}" for note in result.notes)
    if verbose:  # where the time went
        seconds = {**result.seconds, "all": sum(result.seconds.values())}
        rows = ((title, f"{taken:.2f}") for title, taken in seconds.items())
        yield table(("stage", "seconds"), rows, numbers_from=1, box=None)
