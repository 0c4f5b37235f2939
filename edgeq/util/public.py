"""Make a function public: progress without being asked, messages in Python's words, and short tracebacks.

Importing any module of a package makes the package an attribute of its parent, over whatever function of that name the
parent hands out. So a package that is also a function (`edgeq.tune(...)`, and `import edgeq.tune.space`) is made
callable itself, and there is one object, whichever way it is reached.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from edgeq.errors import EdgeqError
from edgeq.util.display import Progress, in_python

_BEFORE = {"validation": "val"}
"""Earlier names of arguments, which are taken as long as the function has the name of today."""


@functools.cache
def public(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a Python session calls it.

    It shows progress where `progress` is not given, takes the earlier names of its arguments, and raises errors whose
    message names arguments instead of options and whose traceback ends at the caller.
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
    """Progress whose notes name arguments instead of options."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown

    def stage(self, title: str, total: int | None = None) -> Any:
        """Open a stage; see `Progress.stage`."""
        return self._shown.stage(title, total)

    def note(self, text: str) -> None:
        """Say one line; see `Progress.note`."""
        self._shown.note(in_python(text))


class CallablePackage(ModuleType):
    """Forward calls of a package to one of its functions, imported at the first call.

    `inspect.signature` and `help` look through `__wrapped__` at that function.
    """

    forwards_to: str

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module, _, name = self.forwards_to.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return public(self.__wrapped__)(*args, **kwargs)


def make_callable(package: str, function: str) -> None:
    """Let calls of the package `package` (its `__name__`) go to `function`, "module:name".

    Type checkers see the function itself, which `edgeq/__init__.py` imports for them alone.
    """
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__dict__["forwards_to"] = function
