"""Check the files, the outputs and the names in a recipe before its first command runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from edgeq.cli._checked_text import CheckedText
from edgeq.cli._options import InputPath, OutputPath
from edgeq.cli._recipe import RecipeStep, parameters_of, several
from edgeq.errors import EdgeqError, OutputError
from edgeq.util.outputs import check_free


def check_steps(recipe: Path, steps: Sequence[RecipeStep], *, force: bool) -> None:
    """Check every value of the recipe that names something: a file, an output, a target, an engine, a task.

    A file that an earlier command writes need not exist yet. The check does not read files.

    Args:
        force: whether every command may replace its outputs.

    Raises:
        EdgeqError: a value is wrong. The message names the recipe, the table and the key.
    """
    outputs: dict[Path, str] = {}
    with contextlib.chdir(recipe.absolute().parent):
        for step in steps:
            for key, parameter, value in _values(step.context):
                place = f"[{(step.context.info_name or '').replace(' ', '.')}] {key}"
                try:
                    if _is_output(parameter, step.context.params):
                        _check_output(parameter.type, value, step.context.params, outputs, force=force)
                    elif not _is_written_before(value, outputs):
                        _check_input(parameter, value)
                except EdgeqError as error:
                    raise type(error)(f"{recipe}: {place}: {error.problem}", error.fix) from error
            for key, parameter, value in _values(step.context):
                if _is_output(parameter, step.context.params):
                    outputs[Path(value).absolute()] = f"[{step.context.info_name}] {key}"


def _values(context: click.Context) -> Iterator[tuple[str, click.Parameter, Any]]:
    """Yield the key, the parameter and each value that the recipe sets."""
    for key, parameter in parameters_of(context.command).items():
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE:
            yield from ((key, parameter, value) for value in several(context.params[parameter.name or ""]))


def _is_output(parameter: click.Parameter, params: Mapping[str, Any]) -> bool:
    """Return whether the command makes the path. An argument such as the bundle of `sign` exists already."""
    return (
        isinstance(parameter, click.Option)
        and isinstance(parameter.type, OutputPath)
        and (parameter.type.written(params) and not params.get("dry_run"))
    )


def _check_output(
    kind: Any, path: Path, params: Mapping[str, Any], outputs: Mapping[Path, str], *, force: bool
) -> None:
    allowed = force or bool(params.get("force")) or kind.replaced(params)
    if path.absolute() in outputs and not allowed:
        raise OutputError(f"{path} is already the output of {outputs[path.absolute()]}", "Choose another output")
    # Some commands fill an existing folder, and check its files themselves.
    if not path.is_dir() or any(path.iterdir()):
        check_free(path, force=allowed)


def _is_written_before(value: Any, outputs: Mapping[Path, str]) -> bool:
    """Return whether `value` names an output of an earlier command, or a file in one."""
    try:
        path = Path(value).absolute()
    except (TypeError, ValueError):
        return False
    return not outputs.keys().isdisjoint((path, *path.parents))


def _check_input(parameter: click.Parameter, value: Any) -> None:
    kind = parameter.type
    if isinstance(kind, OutputPath):
        InputPath().check(value)
    elif isinstance(kind, CheckedText | InputPath):
        kind.check(value)
