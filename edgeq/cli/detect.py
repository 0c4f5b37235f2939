"""`edgeq detect`: this machine, the profile that fits it, and why."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common


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
    printer.lines({"machine": machine, "match": match}, lines)
