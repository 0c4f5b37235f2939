"""Make a function public: show progress by default, accept former names of arguments, and shorten tracebacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from edgeq.errors import EdgeqError

_BEFORE = {"validation": "val", "first": "start"}
"""Current name of an argument, by its former name. Functions with the current argument also accept the former name."""


@functools.cache
def public(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of `function` for Python sessions.

    The new function shows progress if `progress` is not given, and accepts the former names of its arguments. The
    traceback of an error of edgeq ends at the caller.
    """
    takes = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        for before, name in _BEFORE.items():
            if before in named and name in takes and name not in named:
                named[name] = named.pop(before)
        if "progress" in takes and "progress" not in named and len(given) <= list(takes).index("progress"):
            from edgeq.util.progress import default_progress

            named["progress"] = default_progress()
        try:
            return function(*given, **named)
        except EdgeqError as error:
            raise error.with_traceback(None) from None

    return call
