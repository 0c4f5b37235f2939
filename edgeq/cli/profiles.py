"""`edgeq profiles`: what classes of hardware edgeq knows, and how it quantizes for each."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import complete_target


@click.command()
@click.argument("action", type=click.Choice(["list", "show"]), default="list")
@click.argument("name", required=False, shell_complete=complete_target)
@click.option("--why", is_flag=True, help="With show: the reason for each default, and where it comes from.")
@common
def command(printer: Printer, action: str, name: str | None, why: bool) -> None:
    """List hardware profiles, or show the one called NAME."""
    from edgeq.hardware import show
    from edgeq.hardware.profile import load_profiles

    profiles = load_profiles()
    if action == "list":
        plain, lines = show.profile_list(profiles)
    else:
        plain, lines = show.profile_page(show.pick("profile", name, profiles), why=why or printer.verbose)
    printer.lines(plain, lines)
