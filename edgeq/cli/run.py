"""edgeq run: what a recipe says."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._next import fill_next
from edgeq.cli._options import PATH


@click.command("run")
@click.argument("recipe", type=PATH, metavar="RECIPE.toml")
@click.option("--dry-run", is_flag=True, help="Check the recipe and print its commands.")
@click.option("--force", is_flag=True, help="Replace outputs; RECIPE alone may not say so.")
@click.option("--allow-code", is_flag=True, help="Run the Python functions and programs that RECIPE names.")
@click.option("--allow-hosts", is_flag=True, help="Use the boards, registries and schedulers that RECIPE names.")
@click.option(
    "--allow-outputs",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="Let outputs lie below DIR too, not below RECIPE's folder alone. Repeatable.",
)
@common
@click.pass_context
def command(
    context: click.Context,
    printer: Printer,
    recipe: Path,
    *,
    dry_run: bool,
    force: bool,
    allow_code: bool,
    allow_hosts: bool,
    allow_outputs: tuple[Path, ...],
) -> None:
    """Run the commands of RECIPE, in its order, with the options that it gives them; the first that fails ends it.

    A table is a command, its keys are the command's options; keys at the top count for every command that has them.
    Relative paths start from the recipe's folder. Every command prints its recipe with --print-recipe. Without the
    options below, RECIPE runs no code, reaches no other machine, replaces nothing and writes below its folder alone.

    \b
    edgeq quantize model.onnx --data calib/ -o int8.onnx --print-recipe > recipe.toml
    edgeq run recipe.toml
    """
    from edgeq.cli._permissions import Permissions, missing
    from edgeq.cli._recipe import read

    root = context.find_root().command
    assert isinstance(root, click.Group)
    steps = read(recipe, root)
    lacking = missing(recipe, steps, Permissions(allow_code, force, allow_hosts, allow_outputs))
    if dry_run:
        if lacking:
            fill_next(recipe=None)
        lines = [shlex.join(["edgeq", *step.arguments]) for step in steps]
        printer.lines(
            {"recipe": recipe, "commands": lines, "lacking": [str(error) for error in lacking]},
            [*lines, *(f"refused: {error}" for error in lacking)],
        )
        return
    if lacking:
        raise lacking[0]
    given = {"as_json": printer.as_json, "quiet": printer.quiet, "verbose": printer.verbose}
    with contextlib.chdir(recipe.absolute().parent):
        for step in steps:
            step.context.params.update(given)
            if force and "force" in step.context.params:
                step.context.params["force"] = True
            with step.context:
                step.context.command.invoke(step.context)
