"""edgeq demo: the main job on the embedded demo model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import PATH

if TYPE_CHECKING:
    from rich.console import Console

    from edgeq.pipeline.demo import Demonstration


@click.command("demo")
@click.option("-o", "--output", type=PATH, default=Path("edgeq-demo"), show_default=True, help="Where the bundle goes.")
@click.option("--files", type=PATH, metavar="DIR", help="Write the model and its samples to DIR, and nothing else.")
@click.option("--force", is_flag=True, help="Replace what is there; a bundle of an earlier demo is replaced anyway.")
@common
def command(printer: Printer, output: Path, files: Path | None, force: bool) -> None:
    """Quantize the embedded digit classifier for this machine, prove it, bundle it, verify it and time it."""
    from edgeq.pipeline.demo import demonstrate, write_files

    if files is not None:
        written = write_files(files)
        printer.lines({"files": written}, map(str, written))
        return

    result = demonstrate(output, force=force, progress=printer.progress())
    printer.result(result, lambda console: _draw(console, result, verbose=printer.verbose))


def _draw(console: Console, result: Demonstration, *, verbose: bool) -> None:
    from edgeq_device.claim import Claim
    from edgeq_device.text import report_lines
    from rich.table import Table

    machine, match = result.machine, result.match
    console.print(f"machine   {machine.cpu_name or 'unknown CPU'}, {machine.usable_threads} threads")
    console.print(f"profile   {match.profile.name}: {match.profile.title}")
    for reason in match.explain() if verbose else [f"because it has {', '.join(match.reasons)}"]:
        console.print(f"          {reason}")
    for line in report_lines(result.verified):
        console.print(f"verify    {line}")
    table = Table("", "p50 ms", "p90 ms", "p99 ms", "size kB", "top-1", "int8 MACs")
    for row in result.rows:
        latency = (f"{value:.3f}" for value in (row.p50_ms, row.p90_ms, row.p99_ms))
        table.add_row(row.name, *latency, f"{row.bytes / 1e3:.0f}", f"{row.top1:.4f}", f"{row.int8_mac_share:.1%}")
    console.print(table)
    name = next(n for n in result.measurement.report["models"] if n != result.rows[0].name)
    console.print(Claim.read(result.measurement.ratio(name)).sentence("int8", "float32"))
    for note in result.measurement.notes:
        console.print(f"note: {note}")
    console.print(f"bundle    {result.packaged.bundle.resolve()}")
    console.print(f"try       python {result.packaged.bundle / 'edgeq_run.py'} verify")
