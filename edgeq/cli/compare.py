"""edgeq compare: two models or bundles side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, styled, table
from edgeq.cli._next import fill_next
from edgeq.cli._options import PATH, comparison_arguments, comparison_options

if TYPE_CHECKING:
    from edgeq.report.comparison import Comparison


@click.command("compare")
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@comparison_options
@click.option("--duration", "duration_s", type=float, default=2.0, show_default=True, help="Seconds each is timed.")
@click.option("--no-timing", is_flag=True, help="Do not time them.")
@click.option("--max-drop", metavar="DROP", help="Fail if B loses more accuracy: 0.01, 1% or 1pt. Needs --task.")
@click.option(
    "--min-speedup",
    type=click.FloatRange(min=0, min_open=True),
    metavar="TIMES",
    help="Fail unless B is shown to be so many times as fast as A, such as 1.5.",
)
@common
def command(printer: Printer, a: Path, b: Path, **options: Any) -> None:
    """Compare A and B, each a model or a bundle: inputs and outputs, size, coverage, answers, latency.

    \b
    edgeq compare float.onnx int8.onnx --data val/ --preprocess imagenet
    edgeq compare old.edgeq new.edgeq --data val/ --task classification
    edgeq compare float.onnx int8.onnx --data val/ --task classification --max-drop 1pt --min-speedup 1.5
    """
    from edgeq.jobs.job import share
    from edgeq.report.compare import compare

    timed = not options.pop("no_timing")
    drop = share("--max-drop", options.pop("max_drop"))
    given = comparison_arguments(options)
    found = compare(a, b, timed=timed, max_drop=drop, progress=printer.progress(), **given)
    printer.lines(found, _draw(found))
    pair = found.debuggable
    fill_next(a=pair[0].path, b=pair[1].path) if pair is not None else fill_next(a=None)
    found.check()


def _draw(found: Comparison) -> Lines:
    for name, side in (("A", found.a), ("B", found.b)):
        variant = f", variant {side.variant}" if side.variant else ""
        yield f"{name}  {side.path}{variant}"
    yield from (styled(f"differs: {difference}", "yellow") for difference in found.signature_differences)
    if rows := found.rows():
        yield table(("", "A", "B", "B against A"), rows)
    yield from (styled(sentence, "bold") for sentence in found.verdict())
    yield from (f"note: {note}" for note in found.notes)
