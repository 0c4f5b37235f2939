"""Run a recipe with only the permissions that the user typed. Somebody else may have written the recipe."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgeq.cli._common import Printer, command, fill_next
from edgeq.cli._options import PATH, Output
from edgeq.cli._recipe import Step, parameters_of, several
from edgeq.errors import UsageError
from edgeq.util.registry import names_function

PROGRAMS = {"sysroot", "sources", "onnxruntime", "wheels"}
"""Parameters that name the source of programs that edgeq runs or installs."""
HOSTS = {"on", "board", "reference", "workers"}
"""Parameters that name other machines. `workers` is included because it can name a scheduler, which sends pickles, and
pickles can run code.
"""


@dataclass(frozen=True)
class Permissions:
    """Hold the permissions that the user typed.

    Attributes:
        code: permission to run the programs and the functions in Python files that the recipe names.
        force: permission to replace outputs.
        hosts: permission to use the boards, registries and schedulers that the recipe names.
        folders: folders besides the recipe's own that may contain outputs.
    """

    code: bool = False
    force: bool = False
    hosts: bool = False
    folders: tuple[Path, ...] = ()


def missing(recipe: Path, steps: Sequence[Step], given: Permissions) -> list[UsageError]:
    """Return an error for each permission that the `steps` of the recipe need but the user did not give. Each error
    names the option to type.
    """
    return [error for step in steps for error in _missing(recipe, step.context, given)]


def _missing(recipe: Path, context: click.Context, given: Permissions) -> Iterator[UsageError]:
    folder = recipe.absolute().parent
    roots = [Path(os.path.realpath(root)) for root in (folder, *given.folders)]
    for key, parameter in parameters_of(context.command).items():
        for value in several(context.params[parameter.name or ""]):
            if value is None:
                continue
            said = f"{recipe}: [{(context.info_name or '').replace(' ', '.')}] {key} = {str(value)!r}"
            place = Path(os.path.realpath(folder / str(value)))
            if _is_code(parameter, value) and not given.code:
                yield UsageError(f"{said} runs code", "Read what it runs, then pass --allow-code to edgeq run")
            if parameter.name == "force" and value and not given.force:
                yield UsageError(f"{said} replaces existing outputs", "To allow it, pass --force to edgeq run")
            if _is_host(parameter, value) and not given.hosts:
                yield UsageError(f"{said} uses another machine", "If you trust it, pass --allow-hosts to edgeq run")
            if _is_written(parameter, context.params) and not any(root in place.parents for root in roots):
                yield UsageError(
                    f"{said} would be written outside the recipe's folder",
                    f"To allow it, pass --allow-outputs {place.parent} to edgeq run",
                )


def _is_code(parameter: click.Parameter, value: Any) -> bool:
    return (
        parameter.name in PROGRAMS
        or (isinstance(value, str) and names_function(value))
        or _is_scheduler(parameter, value)
    )


def _is_host(parameter: click.Parameter, value: Any) -> bool:
    return parameter.name in HOSTS and (parameter.name != "workers" or _is_scheduler(parameter, value))


def _is_scheduler(parameter: click.Parameter, value: Any) -> bool:
    return parameter.name == "workers" and not str(value).isdecimal()


def _is_written(parameter: click.Parameter, given: Mapping[str, Any]) -> bool:
    return isinstance(parameter.type, Output) and parameter.type.written(given)


@command("run")
@click.argument("recipe", type=PATH, metavar="RECIPE.toml")
@click.option("--dry-run", is_flag=True, help="Check the recipe and print its commands.")
@click.option("--force", is_flag=True, help="Replace existing outputs. A key in RECIPE is not enough.")
@click.option("--allow-code", is_flag=True, help="Run the Python functions and programs that RECIPE names.")
@click.option("--allow-hosts", is_flag=True, help="Use the boards, registries and schedulers that RECIPE names.")
@click.option(
    "--allow-outputs",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="Allow outputs below DIR, besides RECIPE's folder. Repeatable.",
)
@click.pass_context
def run_command(
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
    """Run the commands of RECIPE in order, with the options in it. If a command fails, the run ends.

    Each table is a command, and its keys are the command's options. Keys at the top apply to every command that has
    these options. Paths are relative to the recipe's folder. Every command prints its own recipe with --print-recipe.

    Without the options below, RECIPE runs no code, connects to no other machine, replaces no output, and writes only
    inside its folder.

    \b
    edgeq quantize model.onnx --data calib/ -o int8.onnx --print-recipe > recipe.toml
    edgeq run recipe.toml
    """
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
