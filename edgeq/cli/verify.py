"""`edgeq verify BUNDLE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Face, common
from edgeq.cli._options import PATH

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("bundle", type=PATH)
@click.option("--variant", metavar="NAME", help="Check this variant alone.")
@common
def command(bundle: Path, variant: str | None, face: Face) -> None:
    """Check BUNDLE (a directory or an .edgeq file): hashes, loading, and the self-test of what can run here."""
    from edgeq_device.text import report_lines

    from edgeq.bundle.verify import check_report, verify_bundle

    report = verify_bundle(bundle, variant=variant, progress=face.progress())

    def human(console: Console) -> None:
        for line in report_lines(report):
            console.print(line, markup=False)

    face.result(report.to_dict(), human)
    check_report(report)
