"""Implement `edgeq demo`, which runs the main workflow on the built-in demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Lines, Printer, command, table
from edgeq.cli._options import OUTPUT, OutputPath

if TYPE_CHECKING:
    from edgeq.jobs.demo import Demonstration


@command("demo")
@click.option(
    "-o",
    "--output",
    type=OutputPath(lambda given: given["files"] is None, replaced=lambda given: True),
    default=Path("edgeq-demo"),
    show_default=True,
    help="Path of the bundle.",
)
@click.option(
    "--files", type=OUTPUT, metavar="DIR", help="Write the model and its samples to DIR, and do nothing else."
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace an existing output. The bundle of an earlier demo is replaced without --force.",
)
def demo_command(printer: Printer, output: Path, files: Path | None, force: bool) -> None:
    """Quantize the built-in digit classifier for this machine, prove it, bundle it, verify it and time it."""
    from edgeq.jobs.demo import demonstrate, write_files

    if files is not None:
        paths = write_files(files)
        printer.lines({"files": paths}, map(str, paths))
        return

    result = demonstrate(output, force=force, progress=printer.progress())
    printer.lines(result, _demo_lines(result, verbose=printer.verbose))


def _demo_lines(result: Demonstration, *, verbose: bool) -> Lines:
    from edgeq_device.bundle.verify import report_lines

    from edgeq.measure.latency import read_speed
    from edgeq.util.numbers import share, size

    machine, match = result.machine, result.match
    yield f"machine   {machine.cpu_name or 'unknown CPU'}, {machine.usable_threads} threads"
    yield f"profile   {match.profile.name}: {match.profile.title}"
    for reason in match.explain() if verbose else [f"because it has {', '.join(match.reasons)}"]:
        yield f"          {reason}"
    yield from (f"verify    {line}" for line in report_lines(result.verified))
    rows = []
    for row in result.rows:
        latency = (f"{value:.3f}" for value in (row.p50_ms, row.p90_ms, row.p99_ms))
        rows.append((row.name, *latency, size(row.bytes), share(row.top1, 2), share(row.int8_mac_share)))
    yield table(("", "p50 ms", "p90 ms", "p99 ms", "size", "top-1", "int8 MACs"), rows)
    name = next(n for n in result.measurement.report["models"] if n != result.rows[0].name)
    yield read_speed(result.measurement, name).sentence("int8", "float32")
    yield from (f"note: {note}" for note in result.measurement.notes)
    yield f"bundle    {result.packaged.bundle.resolve()}"
    yield f"try       python {result.packaged.bundle / 'edgeq_run.py'} verify"
