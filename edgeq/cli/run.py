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

from edgeq.cli._common import GroupedCommand, Printer, command
from edgeq.cli._next import fill_next
from edgeq.cli._options import PATH, OutputPath
from edgeq.cli._recipe import RecipeStep, parameters_of, several
from edgeq.errors import UsageError
from edgeq.util.user_code import names_function

PROGRAMS = {"sysroot", "sources", "onnxruntime", "wheels"}
"""Parameters that name the source of programs that edgeq runs or installs."""
STARTS = {"opened"}
"""Flags that start a program of the system."""
HOSTS = {"on", "board", "reference", "workers"}
"""Parameters that name other machines. `workers` is included because it can name a scheduler, which sends pickles, and
pickles can run code.
"""


@dataclass(frozen=True)
class Permissions:
    """Hold the permissions that the user typed.

    Attributes:
        code: permission to run the programs and the functions in Python files that the recipe names, and to start
            programs.
        installs: permission to download and install what the recipe's commands download and install.
        force: permission to replace outputs.
        hosts: permission to use the boards, registries and schedulers that the recipe names.
        folders: folders besides the recipe's own that may contain outputs.
    """

    code: bool = False
    installs: bool = False
    force: bool = False
    hosts: bool = False
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Need:
    """Describe something that a recipe does only with a permission.

    Attributes:
        what: the recipe, the place in it, and what it does.
        option: the option of `edgeq run` that permits it, as the user types it.
        given: whether the user typed it.
    """

    what: str
    option: str
    given: bool

    @property
    def error(self) -> UsageError:
        """Return the error that names the option."""
        return UsageError(self.what, f"If you trust the recipe, pass {self.option} to edgeq run")


def needs(recipe: Path, steps: Sequence[RecipeStep], permissions: Permissions) -> list[Need]:
    """Return everything in the `steps` of the recipe that needs a permission, in the recipe's order."""
    return [need for step in steps for need in _needs(recipe, step.context, permissions)]


def _needs(recipe: Path, context: click.Context, permissions: Permissions) -> Iterator[Need]:
    folder = recipe.absolute().parent
    roots = [Path(os.path.realpath(root)) for root in (folder, *permissions.folders)]
    table = f"{recipe}: [{(context.info_name or '').replace(' ', '.')}]"
    if isinstance(context.command, GroupedCommand) and (installation := context.command.installs(context.params)):
        yield Need(f"{table} {installation}", "--allow-installs", permissions.installs)
    for key, parameter in parameters_of(context.command).items():
        for value in several(context.params[parameter.name or ""]):
            if value is None:
                continue
            said = f"{table} {key} = {str(value)!r}"
            place = Path(os.path.realpath(folder / str(value)))
            if parameter.name in STARTS and value:
                yield Need(f"{said} starts a program", "--allow-code", permissions.code)
            if _is_code(parameter, value):
                yield Need(f"{said} runs code", "--allow-code", permissions.code)
            if parameter.name == "force" and value:
                yield Need(f"{said} replaces existing outputs", "--force", permissions.force)
            if _is_host(parameter, value):
                yield Need(f"{said} uses another machine", "--allow-hosts", permissions.hosts)
            if _is_written(parameter, context.params) and roots[0] not in place.parents:
                inside = any(root in place.parents for root in roots)
                yield Need(
                    f"{said} would be written outside the recipe's folder", f"--allow-outputs {place.parent}", inside
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


def _is_written(parameter: click.Parameter, parameters: Mapping[str, Any]) -> bool:
    return isinstance(parameter.type, OutputPath) and parameter.type.written(parameters)


@command("run")
@click.argument("recipe", type=PATH, metavar="RECIPE.toml")
@click.option("--dry-run", is_flag=True, help="Check the recipe and print its commands.")
@click.option("--force", is_flag=True, help="Replace existing outputs. A key in RECIPE is not enough.")
@click.option(
    "--allow-code", is_flag=True, help="Run the Python functions and programs that RECIPE names, and start programs."
)
@click.option(
    "--allow-installs", is_flag=True, help="Download and install the programs that RECIPE's commands install."
)
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
    allow_installs: bool,
    allow_hosts: bool,
    allow_outputs: tuple[Path, ...],
) -> None:
    """Run the commands of RECIPE in order, with the options in it. If a command fails, the run ends.

    Each table is a command, and its keys are the command's options. Keys at the top apply to every command that has
    these options. Paths are relative to the recipe's folder. Every command prints its own recipe with --print-recipe.

    Without the options below, RECIPE runs no code, installs nothing, connects to no other machine, replaces no output,
    and writes only inside its folder.

    \b
    edgeq quantize model.onnx --data calib/ -o int8.onnx --print-recipe > recipe.toml
    edgeq run recipe.toml
    """
    from edgeq.cli._recipe import read_recipe
    from edgeq.cli._recipe_check import check_steps

    root = context.find_root().command
    assert isinstance(root, click.Group)
    steps = read_recipe(recipe, root)
    requirements = needs(recipe, steps, Permissions(allow_code, allow_installs, force, allow_hosts, allow_outputs))
    lacking = [need.error for need in requirements if not need.given]
    if dry_run:
        if lacking:
            fill_next(recipe=None)
        lines = [shlex.join(["edgeq", *step.arguments]) for step in steps]
        allowed = [f"{need.what}, as {need.option} allows" for need in requirements if need.given]
        printer.lines(
            {"recipe": recipe, "commands": lines, "lacking": [error.text for error in lacking], "allowed": allowed},
            [*lines, *(f"refused: {error.text}" for error in lacking), *(f"allowed: {text}" for text in allowed)],
        )
        return
    if lacking:
        raise lacking[0]
    check_steps(recipe, steps, force=force)
    output_options = {"as_json": printer.as_json, "quiet": printer.quiet, "verbose": printer.verbose}
    with contextlib.chdir(recipe.absolute().parent):
        for step in steps:
            step.context.params.update(output_options)
            if force and "force" in step.context.params:
                step.context.params["force"] = True
            with step.context:
                step.context.command.invoke(step.context)
