"""Make a function public: show progress by default, use Python's words in messages, and shorten tracebacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from edgeq.errors import EdgeqError
from edgeq.util.display import Progress, in_python

_BEFORE = {"validation": "val", "first": "start"}
"""Current name of an argument, by its former name. Functions with the current argument also accept the former name."""


@functools.cache
def public(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` for Python sessions.

    The new function shows progress if `progress` is not given, and accepts the former names of its arguments. Its error
    messages name arguments instead of options, and its tracebacks end at the caller.
    """
    takes = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for before, name in _BEFORE.items():
            if before in named and name in takes and name not in named:
                named[name] = named.pop(before)
        if "progress" in takes and "progress" not in named and len(given) <= list(takes).index("progress"):
            from edgeq.util.progress import default_progress

            named["progress"] = _InPython(default_progress())
        try:
            return function(*given, **named)
        except EdgeqError as error:
            error.reword(in_python)
            raise error.with_traceback(None) from None

    return call


class _InPython:
    """Show progress, and name arguments instead of options in notes."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def stage(self, title: str, total: int | None = None) -> Any:
        """Open a stage; see `Progress.stage`."""
        return self._shown.stage(title, total)

    def note(self, text: str) -> None:
        """Show one line; see `Progress.note`."""
        self._shown.note(in_python(text))
