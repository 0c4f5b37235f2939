"""Read the options of the older tools as their users spell them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from edgeq.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}


def switch(*names: str, help: str) -> Callable[[F], F]:
    """Define a boolean option with an optional value (`--flag`, `--flag True`, `--flag=false`, `--flag 0`).

    The older tools read some booleans as text, and any text counted as true, even "False".
    """
    # `flag_value` is the value of the option without text, so all spellings reach one conversion.
    return click.option(*names, is_flag=False, flag_value="true", default="false", type=click.BOOL, help=help)


class OneOf(click.ParamType):  # type: ignore[type-arg]  # not generic in click 8.1
    """Accept one value. The older tool accepted a comma-separated list and ran once for each value."""

    def __init__(self, value: click.ParamType) -> None:  # type: ignore[type-arg]
        self._value, self.name = value, value.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Return the placeholder of the value's own type."""
        return self._value.get_metavar(param, ctx)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the converted value. Refuse a list, with a message that shows what to type."""
        if isinstance(value, str) and "," in value and param is not None:
            # The message shows the first value, so the user can copy the line as it stands.
            choice = value.split(",")[0].strip()
            self.fail(
                f"only one value per run is allowed. Type {param.opts[0]} {choice}, then run the others", param, ctx
            )
        return self._value.convert(value, param, ctx)


class ArgumentParser(argparse.ArgumentParser):
    """Parse options that accept lists of names (`--nodes_to_exclude conv1 conv2`). click does not support these
    options.
    """

    def error(self, message: str) -> NoReturn:
        """Report wrong options as an edgeq error."""
        # argparse would print its usage and exit by itself, with another exit code.
        raise UsageError(message, f"See `python -m {self.prog} --help`")
