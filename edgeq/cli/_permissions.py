"""Refuse what a recipe may do only where the user types it: somebody else can have written the recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgeq.cli._options import Output
from edgeq.cli._recipe import Step, parameters_of, several
from edgeq.errors import UsageError
from edgeq.util.registry import names_function

PROGRAMS = {"sysroot", "sources", "onnxruntime", "wheels"}
"""Parameters that name what programs are run or installed from."""
HOSTS = {"on", "board", "reference", "workers"}
"""Parameters that name other machines. A scheduler of workers sends pickles, which is code."""


@dataclass(frozen=True)
class Permissions:
    """Permissions that the user typed.

    Attributes:
        code: functions in Python files and programs that the recipe names are run.
        force: outputs are replaced.
        hosts: the boards, registries and schedulers that it names are used.
        folders: outputs may lie below these too, and not below the recipe's folder alone.
    """

    code: bool = False
    force: bool = False
    hosts: bool = False
    folders: tuple[Path, ...] = ()


def missing(recipe: Path, steps: Sequence[Step], given: Permissions) -> list[UsageError]:
    """Return what `steps` of the recipe do that was not typed, each with what to type."""
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
                yield UsageError(f"{said} replaces what is there", "If that is meant, pass --force to edgeq run")
            if _is_host(parameter, value) and not given.hosts:
                yield UsageError(f"{said} uses another machine", "If you trust it, pass --allow-hosts to edgeq run")
            if _is_written(parameter, context.params) and not any(root in place.parents for root in roots):
                yield UsageError(
                    f"{said} is written, and does not lie below the recipe's folder",
                    f"If that is meant, pass --allow-outputs {place.parent} to edgeq run",
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
