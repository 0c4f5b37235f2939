"""`edgeq emulate`: make the machines on which other targets' kernels run, and show what there is."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import PATH


@click.group("emulate")
def command() -> None:
    """Run other machines' kernels on this one, so that bundles can be checked before they are deployed."""


@command.command()
@click.argument("machine", metavar="NAME", default="arm64")
@click.option("--sysroot", type=PATH, metavar="DIR", help="Use this root file system, with Python and onnxruntime in.")
@click.option("--onnxruntime", metavar="VERSION", help="The onnxruntime to put in; else the one installed here.")
@click.option("--sources", type=PATH, metavar="FILE", help="An apt sources file to use in place of the system's.")
@click.option("--force", is_flag=True, help="Make it again.")
@common
def setup(
    machine: str, sysroot: Path | None, onnxruntime: str | None, sources: Path | None, force: bool, printer: Printer
) -> None:
    """Make an emulated machine (arm64) in your cache folder. Needs no root and changes nothing on the system.

    \b
    edgeq emulate setup arm64
    edgeq emulate setup arm64 --sysroot /path/to/a/root/file/system
    """
    from edgeq.emulate.setup import setup as make

    result = make(
        machine, sysroot=sysroot, onnxruntime=onnxruntime, sources=sources, force=force, progress=printer.progress()
    )
    printer.lines(result, result.lines())


@command.command()
@common
def status(printer: Printer) -> None:
    """Show which targets' kernels can be run here, how, and what is missing for the others."""
    from edgeq.backends.base import SIMULATORS
    from edgeq.emulate.setup import status as look

    result = look(SIMULATORS)
    printer.lines(result, result.lines(verbose=printer.verbose))
