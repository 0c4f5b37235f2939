"""`edgeq verify BUNDLE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import PATH, REQUIRE_SIGNATURE, TASK_NAMES, TRUST, Renamed, complete_target, task_options


@click.command()
@click.argument("bundle", type=PATH)
@click.option("--variant", metavar="NAME", help="Check this variant alone.")
@TRUST
@REQUIRE_SIGNATURE
@click.option("--expect", metavar="SHA256", help="Refuse a bundle whose manifest has another hash.")
@click.option(
    "--on",
    multiple=True,
    metavar="TARGET|BOARD|all",
    shell_complete=complete_target,
    help="Run what this target would load, on its own kernels; all: each variant on its target; a board by its "
    "ssh:// address or its name in devices.toml. Repeatable.",
)
@click.option("--data", help="With --on: samples to compare with this machine on: a folder, .npz, .npy, .pb ...")
@click.option(
    "--count",
    cls=Renamed,
    before=["--samples"],
    type=click.IntRange(min=1),
    help="At most so many samples of --data.",
)
@click.option("--preprocess", help="Preprocessing, if not the bundle's own.")
@click.option("--task", help=f"Measure accuracy too: {TASK_NAMES}.")
@task_options()
@click.option("--max-drop", metavar="DROP", help="Fail if accuracy on the target falls by more: 0.005, 0.5% or 0.5pt.")
@common
def command(
    bundle: Path,
    variant: str | None,
    trust: Path | None,
    require_signature: bool,
    expect: str | None,
    printer: Printer,
    **options: Any,
) -> None:
    """Check BUNDLE (a directory or an .edgeq file): hashes, signature, loading, the self-test of what can run here.

    \b
    edgeq verify dist/ --trust build.pub
    edgeq verify dist/ --on all
    edgeq verify dist/ --on raspberry-pi-5 --data val/ --count 100 --task classification
    edgeq verify dist/ --on ssh://pi@10.0.0.5
    """
    from edgeq_device.text import report_lines

    from edgeq.bundle.verify import check_report, check_trusted, verify_bundle

    if options["on"]:
        from edgeq.remote.verify import verify_everywhere

        expect = check_trusted(bundle, trust=trust, required=require_signature, expect=expect)
        found = verify_everywhere(bundle, variant, {**options, "expect": expect}, progress=printer.progress())
        printer.lines(found, found.lines())
        found.check()
        return

    from edgeq.jobs.target_checks import refuse_without_target

    refuse_without_target(options)
    report = verify_bundle(
        bundle,
        variant=variant,
        trust=trust,
        require_signature=require_signature,
        expect=expect,
        progress=printer.progress(),
    )
    printer.lines(report, report_lines(report))
    check_report(report)
