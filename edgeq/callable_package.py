"""A package that is also a function: `edgeq.tune(...)`, and `import edgeq.tune.space` beside it.

Importing any module of a package makes the package an attribute of its parent, over whatever function of that name the
parent hands out. So such a package is made callable itself, and there is one object, whichever way it is reached.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that forwards calls to one of its functions, imported at the first call.

    `inspect.signature` and `help` look through `__wrapped__` at that function.
    """

    forwards_to: str

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module, _, name = self.forwards_to.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def make_callable(package: str, function: str) -> None:
    """Let calls of the package `package` (its `__name__`) go to `function`, "module:name".

    Type checkers see the function itself, which `edgeq/__init__.py` imports for them alone.
    """
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__dict__["forwards_to"] = function
