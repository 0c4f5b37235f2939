"""`edgeq preprocess`: what preprocessings there are, and what each computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from edgeq.cli._common import Printer, common

if TYPE_CHECKING:
    from rich.console import Console


@click.group("preprocess", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """List preprocessings, or show one's arithmetic."""


@command.command("list")
@common
def list_(printer: Printer) -> None:
    """List the names, steps and source options that --preprocess takes."""
    from edgeq.data.describe import list_preprocessings

    plain = list_preprocessings()

    def human(console: Console) -> None:
        console.print("Names:")
        for entry in plain["preprocessings"]:
            console.print(f"  {entry['name']:<20}{entry['title']}", markup=False)
        console.print("Steps, applied in the order written, as 'resize=short:256,crop=224,divide=255':")
        for name, text in plain["steps"].items():
            console.print(f"  {name:<20}{text}", markup=False)
        console.print(f"  {plain['filters']}", markup=False)
        console.print("Source options, among the steps or in the \\[source] table of a .toml file:")
        for name, text in plain["source"].items():
            console.print(f"  {name:<20}{text}", markup=False)

    printer.result(plain, human)


@command.command("show")
@click.argument("name")
@common
def show(name: str, printer: Printer) -> None:
    """Show the exact arithmetic of NAME: a name, a .toml file, file.py:function, or steps."""
    from edgeq.data.describe import show_preprocessing

    plain = show_preprocessing(name)

    def human(console: Console) -> None:
        console.print(f"{plain['name']}: {plain['title']}" if plain["title"] else plain["name"], markup=False)
        for number, line in enumerate(plain["arithmetic"], 1):
            console.print(f"  {number}. {line}", markup=False)
        for key, value in plain["spec"].get("source", {}).items():
            console.print(f"  source.{key} = {value}", markup=False)
        console.print("Integers become float32 before arithmetic; constants are rounded to the array's dtype.")

    printer.result(plain, human)
