"""`edgeq preprocess`: what preprocessings there are, and what each computes."""

from __future__ import annotations

import click

from edgeq.cli._common import Printer, common


@click.group("preprocess", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List preprocessings, or show one's arithmetic."""


@command.command("list")
@common
def list_(printer: Printer) -> None:
    """List the names, steps and source options that --preprocess takes."""
    from edgeq.data.preprocess import list_preprocessings

    plain = list_preprocessings()
    lines = [
        "Names:",
        *(f"  {entry['name']:<20}{entry['title']}" for entry in plain["preprocessings"]),
        "Steps, applied in the order written, as 'resize=short:256,crop=224,divide=255':",
        *(f"  {name:<20}{text}" for name, text in plain["steps"].items()),
        f"  {plain['filters']}",
        "Source options, among the steps or in the [source] table of a .toml file:",
        *(f"  {name:<20}{text}" for name, text in plain["source"].items()),
    ]
    printer.lines(plain, lines)


@command.command("show")
@click.argument("name")
@common
def show(name: str, printer: Printer) -> None:
    """Show the exact arithmetic of NAME: a name, a .toml file, file.py:function, or steps."""
    from edgeq.data.preprocess import show_preprocessing

    plain = show_preprocessing(name)
    lines = [
        f"{plain['name']}: {plain['title']}" if plain["title"] else plain["name"],
        *(f"  {number}. {line}" for number, line in enumerate(plain["arithmetic"], 1)),
        *(f"  source.{key} = {value}" for key, value in plain["spec"].get("source", {}).items()),
        "Integers become float32 before arithmetic; constants are rounded to the array's dtype.",
    ]
    printer.lines(plain, lines)
