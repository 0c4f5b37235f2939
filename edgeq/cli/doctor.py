"""edgeq doctor: what is installed and what works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import on_board

if TYPE_CHECKING:
    from edgeq.jobs.doctor import Diagnosis


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Build, run and time the demo model on the GPU too. Takes minutes.")
@on_board
@common
def command(printer: Printer, gpu: bool, on: str | None) -> None:
    """Say what is installed here and what works, and with --gpu run it.

    \b
    edgeq doctor
    edgeq doctor --on ssh://pi@10.0.0.5
    edgeq doctor --gpu --json > gpu.json
    """
    if on is None:
        from edgeq.jobs.doctor import doctor

        found = doctor(gpu=gpu, progress=printer.progress())
    else:
        from edgeq.errors import UsageError
        from edgeq.remote.devices import one_board
        from edgeq.remote.machine import doctor_board

        if gpu:
            raise UsageError("--gpu is for this machine's GPU", "Leave it out, or run edgeq doctor on the board")
        found = doctor_board(one_board(on), progress=printer.progress())
    printer.lines(found, _lines(found))
    found.check(gpu=gpu)


def _lines(found: Diagnosis) -> list[str]:
    width = max(len(check.name) for check in found.checks)
    return [f"{check.status:8} {check.name:{width}}  {check.detail}" for check in found.checks]
