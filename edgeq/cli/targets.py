"""`edgeq targets`: where models can be sent, and what edgeq knows of each place."""

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
    """List deployment targets, or show the one called NAME (or in the .toml file NAME)."""
    from edgeq.hardware import show
    from edgeq.hardware.target import load_targets, resolve

    shown = named_to_show("target", action, name, why=why)
    if shown is None:
        plain, lines = show.target_list(load_targets())
    else:
        plain, lines = show.target_page(resolve(shown), why=why or printer.verbose)
    printer.lines(plain, lines)
