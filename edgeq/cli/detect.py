"""`edgeq detect`: this machine, the profile that fits it, and why; the engines that are installed or would help."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common


@click.command()
@common
def command(printer: Printer) -> None:
    """Show this machine, the profile that fits it and the engines for it. With -v, every CPU feature."""
    from edgeq.engines import load_engines
    from edgeq.hardware import show
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.engines import detect_engines, wrong_on
    from edgeq.hardware.profile import load_profiles, match_profile

    profiles = load_profiles()
    machine = detect_machine()
    match = match_profile(machine, profiles)
    engines = detect_engines(machine, load_engines())
    lines = show.machine_lines(machine, match, profiles, engines, every_feature=printer.verbose)
    printer.lines({"machine": machine, "match": match, "engines": engines, "wrong_kernels": wrong_on(machine)}, lines)
