"""Run recipes, which are commands and their options in TOML. A recipe may set only the parameters that its commands
define in click.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click
from edgeq_device.system.relay import hide_passwords

from edgeq.cli import FILES
from edgeq.errors import EdgeqError, UsageError, suggest
from edgeq.util.record_files import toml_table
from edgeq.util.records import parse

# The options that control how results are printed belong to `edgeq run` itself, which passes them to the commands.
_NOT_KEPT = {"as_json", "quiet", "verbose", "print_recipe"}
_FIX = "See docs/recipe.md; every command prints its recipe with --print-recipe"


@dataclass(frozen=True)
class RecipeStep:
    """Describe one command of a recipe.

    Attributes:
        arguments: the command's name and arguments, as a user would type them.
        context: click's context of the parsed arguments.
    """

    arguments: tuple[str, ...]
    context: click.Context


def typed_names(context: click.Context) -> list[str]:
    """Return the words that name the running command. For `edgeq info detect` this is only `detect`, because recipes
    and next lines leave out the group.
    """
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return names[1:] if len(names) > 1 and names[1] in FILES.get(names[0], ()) else names


def recipe_text(context: click.Context) -> str:
    """Return the recipe of the running command. It contains the options and arguments that the user typed, as TOML.

    Raises:
        UsageError: a value contains a password.
    """
    typed = {
        key: context.params[parameter.name or ""]
        for key, parameter in parameters_of(context.command).items()
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    }
    for key, value in typed.items():
        if any("://" in text and hide_passwords(text) != text for text in map(str, several(value))):
            raise UsageError(f"the recipe would contain the password in {key}", "Leave the password out")
    table = ".".join(name.replace("-", "_") for name in typed_names(context))
    lines = [f"{key} = {_toml(value)}" for key, value in typed.items()]
    return "\n".join(["# edgeq run THIS_FILE; relative paths start from its folder", f"[{table}]", *lines])


def read_recipe(path: Path, group: click.Group) -> list[RecipeStep]:
    """Return the commands of the recipe at `path`, in the recipe's order. Each command is checked like a typed command
    line.

    Raises:
        UsageError: the file is not a recipe; the message names the file, the key and the fix.
    """
    content = toml_table(path, UsageError, _FIX)
    tables = list(_tables(content, group, (), path))
    if not tables:
        raise UsageError(f"{path} contains no command", "Add a table for one, such as [quantize]")
    top_values = {key: value for key, value in content.items() if not isinstance(value, Mapping)}
    keys = {key for _, command, _ in tables for names in [parameters_of(command)] for key in (*names, *_former(names))}
    for key in top_values:
        if key not in keys:
            raise UsageError(f"{path}: unknown key {key!r} at the top", suggest(key, keys))
    running = click.get_current_context(silent=True)
    root = partial(click.Context, group, obj=running.obj if running is not None else None)
    return [_step(path, place, command, top_values, values, root()) for place, command, values in tables]


def _tables(
    content: Mapping[str, Any], group: click.Group, place: tuple[str, ...], path: Path
) -> Iterator[tuple[tuple[str, ...], click.Command, Mapping[str, Any]]]:
    """Yield the place, the command and the content of each table that names a command."""
    context = click.Context(group)
    for key, value in content.items():
        if not isinstance(value, Mapping):
            continue
        name = key.replace("_", "-")
        command = group.get_command(context, name) if name != "run" else None
        if command is None:
            names = [n.replace("-", "_") for n in group.list_commands(context) if n != "run"]
            raise UsageError(f"{path}: [{'.'.join((*place, key))}] is not a command", suggest(key, names))
        if isinstance(command, click.Group):
            yield from _tables(value, command, (*place, key), path)
        else:
            yield (*place, key), command, value


def _step(
    path: Path,
    place: tuple[str, ...],
    command: click.Command,
    top_values: Mapping[str, Any],
    table_values: Mapping[str, Any],
    root: click.Context,
) -> RecipeStep:
    parameters = parameters_of(command)
    kind: Any = dataclasses.make_dataclass("Step", sorted(map(_field, parameters, parameters.values()), key=len))
    former = _former(parameters)
    current = ({former.get(key, key): value for key, value in values.items()} for values in (top_values, table_values))
    top, table = current
    data: Any = {**{key: value for key, value in top.items() if key in parameters}, **table}
    names = [name.replace("-", "_") for name in place]
    for name in reversed(names):
        kind, data = dataclasses.make_dataclass("Table", [(name, kind)]), {name: data}
    step = reduce(getattr, names, parse(data, kind, path, UsageError, unknown_keys=False))
    arguments = _arguments(parameters, step)
    try:
        context = command.make_context(" ".join(names), list(arguments), parent=root)
    except click.UsageError as error:
        raise UsageError(f"{path}: [{'.'.join(place)}]: {' '.join(error.format_message().split())}", _FIX) from error
    except EdgeqError as error:
        raise type(error)(f"{path}: [{'.'.join(place)}]: {error.problem}", error.fix) from error
    except ValueError as error:  # the path contains a null byte
        raise UsageError(f"{path}: [{'.'.join(place)}]: {error}", _FIX) from error
    return RecipeStep((*(name.replace("_", "-") for name in names), *arguments), context)


def parameters_of(command: click.Command) -> dict[str, click.Parameter]:
    """Return the keys that a recipe may contain for `command`: each option's longest name, without dashes, and each
    argument's name.
    """
    return {
        (_long(p) if isinstance(p, click.Option) else p.name or "").lstrip("-").replace("-", "_"): p
        for p in command.params
        if p.name not in _NOT_KEPT
    }


def _former(parameters: Mapping[str, click.Parameter]) -> dict[str, str]:
    """Return an option's former key → its key, so that recipes written for earlier releases still run."""
    return {
        name.lstrip("-").replace("-", "_"): key
        for key, parameter in parameters.items()
        for name in getattr(parameter, "before", ())
    }


def _long(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def _field(key: str, parameter: click.Parameter) -> tuple[Any, ...]:
    """Return the parameter's name and type, and also its default if it is optional. A parameter that takes text also
    accepts a number, as in max_drop = 0.01.
    """
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    kind: Any = str | int | float
    if is_flag:
        kind = bool
    elif isinstance(parameter.type, click.types.IntParamType):
        kind = int
    elif isinstance(parameter.type, click.types.FloatParamType):
        kind = float
    if parameter.multiple or parameter.nargs == -1:
        kind = kind | tuple[kind, ...]
    return (key, kind) if parameter.required else (key, kind | None, None)


def _arguments(parameters: Mapping[str, click.Parameter], step: Any) -> tuple[str, ...]:
    """Return the command line that passes the values of `step`."""
    options, positional = [], []
    for key, parameter in parameters.items():
        value = getattr(step, key)
        values = [str(item) for item in several(value) if item is not None]
        if not isinstance(parameter, click.Option):
            positional += values
        elif not parameter.is_flag:
            options += [f"{_long(parameter)}={item}" for item in values]
        elif value is not None and (value or parameter.secondary_opts):
            options.append(_long(parameter) if value else parameter.secondary_opts[0])
    return (*options, "--", *positional)


def several(value: Any) -> tuple[Any, ...]:
    """Return the values of a parameter as a tuple, even if it has only one."""
    return value if isinstance(value, tuple) else (value,)


def _toml(value: Any) -> str:
    """Return the TOML text of a path, text, number, boolean or list of these. The text is JSON in which invisible
    characters are escaped.

    Raises:
        UsageError: a file name is not UTF-8, so TOML cannot contain it.
    """
    content = [str(item) for item in value] if isinstance(value, tuple) else value
    text = json.dumps(content, ensure_ascii=False, default=str)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"{str(value)!a} is not UTF-8, which a recipe needs", "Rename the file")
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
