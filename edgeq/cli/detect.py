"""`edgeq detect`: this machine, the profile that fits it, and why; the engines that are installed or would help."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import on_board


@click.command()
@on_board
@common
def command(printer: Printer, on: str | None) -> None:
    """Show this machine, the profile that fits it and the engines for it. With -v, every CPU feature.

    \b
    edgeq detect
    edgeq detect --on ssh://pi@10.0.0.5
    """
    from edgeq.hardware import show
    from edgeq.hardware.detect import detect_machine
    from edgeq.hardware.engines import detect_engines, wrong_on
    from edgeq.hardware.profile import load_profiles, match_profile
    from edgeq.run.engines import load_engines

    profiles = load_profiles()
    if on is None:
        machine, installed, state = detect_machine(), None, None
    else:
        from edgeq.remote.devices import one_board
        from edgeq.remote.machine import detect_board

        board = detect_board(one_board(on))
        machine, installed, state = board.machine, board.engines, board.state
    match = match_profile(machine, profiles)
    engines = detect_engines(machine, load_engines(), installed)
    lines = show.machine_lines(machine, match, profiles, engines, every_feature=printer.verbose)
    record = {"machine": machine, "match": match, "engines": engines, "wrong_kernels": wrong_on(machine)}
    if state is not None:
        record["state"] = state
        lines.append(f"  now         {state.text()}")
    printer.lines(record, lines)
