"""edgeq doctor: what is installed and what works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common

if TYPE_CHECKING:
    from edgeq.pipeline.doctor import Diagnosis


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Build, run and time the demo model on the GPU too. Takes minutes.")
@common
def command(printer: Printer, gpu: bool) -> None:
    """Say what is installed here and what works, and with --gpu run it.

    \b
    edgeq doctor
    edgeq doctor --gpu --json > gpu.json
    """
    from edgeq.pipeline.doctor import doctor

    found = doctor(gpu=gpu, progress=printer.progress())
    printer.lines(found, _lines(found))
    found.check(gpu=gpu)


def _lines(found: Diagnosis) -> list[str]:
    width = max(len(check.name) for check in found.checks)
    return [f"{check.status:8} {check.name:{width}}  {check.detail}" for check in found.checks]
