"""`edgeq detect`: this machine, the profile that fits it, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@common
def command(printer: Printer) -> None:
    """Show this machine and the profile that fits it. With -v, every CPU feature."""
    from edgeq.hardware import show
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.profile import load_profiles, match_profile

    profiles = load_profiles()
    machine = detect_machine()
    match = match_profile(machine, profiles)
    lines = show.machine_lines(machine, match, profiles, every_feature=printer.verbose)

    def human(console: Console) -> None:
        for line in lines:
            console.print(line, markup=False)

    printer.result({"machine": machine, "match": match}, human)
