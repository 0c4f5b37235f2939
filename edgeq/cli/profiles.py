"""`edgeq profiles`: what classes of hardware edgeq knows, and how it quantizes for each."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import complete_target, named_to_show


@click.command()
@click.argument("action", type=click.Choice(["list", "show"]), default="list")
@click.argument("name", required=False, shell_complete=complete_target)
@click.option("--why", is_flag=True, help="With show: the reason for each default, and where it comes from.")
@common
def command(printer: Printer, action: str, name: str | None, why: bool) -> None:
    """List hardware profiles, or show the one called NAME (or in the .toml file NAME); a target's has its overrides."""
    from edgeq.hardware import show
    from edgeq.hardware.profile import load_profiles
    from edgeq.hardware.target import resolve

    shown, profiles = named_to_show("profile", action, name, why=why), load_profiles()
    if shown is None:
        plain, lines = show.profile_list(profiles)
    else:
        profile = profiles.get(shown) or resolve(shown).profile
        plain, lines = show.profile_page(profile, why=why or printer.verbose)
    printer.lines(plain, lines)
