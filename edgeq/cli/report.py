"""edgeq report: the page of a bundle."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Lines, Printer, common, styled
from edgeq.cli._next import choose_next
from edgeq.cli._options import OUTPUT, PATH, Output

if TYPE_CHECKING:
    from edgeq.report.bundle import Reported


@click.command("report")
@click.argument("bundle", type=Output(lambda given: given["output"] is None), metavar="BUNDLE|RECORD.json")
@click.option(
    "-o", "--output", type=OUTPUT, metavar="FILE.html", help="The page. [beside the bundle, NAME.report.html]"
)
@click.option(
    "--bench", "measure", is_flag=True, help="Time it here and now against its float32 model, layer by layer."
)
@click.option("--variant", metavar="NAME", help="With --bench: this variant, not the best for this machine.")
@click.option(
    "--fleet", type=PATH, metavar="FILE.json", help="A section on boards: what `bench --on FLEET.toml --json` printed."
)
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@click.option("--force", is_flag=True, help="Replace what is there; an earlier report is replaced anyway.")
@common
def command(
    printer: Printer,
    bundle: Path,
    output: Path | None,
    measure: bool,
    variant: str | None,
    fleet: Path | None,
    opened: bool,
    force: bool,
) -> None:
    """Write the report of BUNDLE (a directory or an .edgeq file): one HTML file that opens offline.

    It is rebuilt from the figures in the bundle; the bundle itself is not changed. A tuning run that found nothing
    has a report too, of the record that `edgeq tune --json` prints.

    \b
    edgeq report dist/ --open
    edgeq report dist/ --bench -o report.html
    edgeq report tuning.json --open
    """
    from edgeq.backends.base import SIMULATORS
    from edgeq.emulate.check import next_check
    from edgeq.report.bundle import report_bundle

    result = report_bundle(
        bundle, output, measure=measure, variant=variant, fleet=fleet, force=force, progress=printer.progress()
    )
    printer.lines(result, _draw(result))
    # Of a record there is nothing to verify.
    choose_next(lambda: None if result.of_record else next_check(bundle, SIMULATORS), bundle=bundle)
    if opened:
        _open(result.page.absolute(), printer)


def _open(page: Path, printer: Printer) -> None:
    """Open the page with the system's program for it, which searches the working directory for no other program."""
    from edgeq.emulate.sysroot import search_path, which

    if os.name == "nt":
        click.launch(str(page))  # by the kind of the file, and not through PATH
        return
    program = which({"darwin": "open"}.get(sys.platform, "xdg-open"))
    if program is None:
        printer.progress().note(f"nothing here opens pages: open {page} yourself")
        return
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    os.posix_spawn(program, [program, str(page)], {**os.environ, "PATH": search_path()}, file_actions=silent)


def _draw(result: Reported) -> Lines:
    verdict = result.verdict
    yield verdict.sentence
    for figure in verdict.figures:
        yield f"  {figure.label}: {figure.value}  {figure.note}".rstrip()
    yield from (styled(f"warning: {warning}", "yellow") for warning in verdict.warnings)
    for line in verdict.commands:
        # Of a record it is not known which bundle it came from, or there was none.
        named = line if result.of_record else line.replace("BUNDLE", shlex.quote(str(result.bundle)))
        yield f"look closer: {named}"
    yield f"report: {result.page}"
