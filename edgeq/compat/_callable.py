"""Make a module that can also be called, because onnxruntime gives a function and a module the same name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from edgeq.util.public import public


class CallableModule(ModuleType):
    """Forward calls of a module to one of its functions, which is imported at the first call.

    `inspect.signature` and `help` find the function through `__wrapped__`.
    """

    forwards_to: str

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module, _, name = self.forwards_to.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return public(self.__wrapped__)(*args, **kwargs)


def make_callable(module_name: str, function: str) -> None:
    """Make a module forward calls to a function.

    Args:
        module_name: the module's `__name__`.
        function: "module:name".
    """
    module = sys.modules[module_name]
    # Only the class of a module that exists can be changed: the import system already made the object.
    module.__class__ = CallableModule
    module.__dict__["forwards_to"] = function
