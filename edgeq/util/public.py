"""Make a function public: show progress by default, take models from memory, accept former names of arguments, and
shorten tracebacks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from edgeq.errors import EdgeqError
from edgeq.util.in_memory import on_disk

_ALSO = {"validation": "val", "first": "start", "target": "targets"}
"""Name of an argument, by another name under which functions with this argument accept it."""


@functools.cache
def public(function: Callable[..., Any], *, takes_models: bool = False) -> Callable[..., Any]:
    """Return a version of `function` for Python sessions.

    The new function shows progress if `progress` is not given, and accepts some other names of its arguments. The
    traceback of an error of edgeq ends at the caller.

    Args:
        takes_models: whether the new function accepts an onnx.ModelProto where `function` needs a path.
    """
    signature = expanded_signature(function)
    takes = signature.parameters

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        for alias, name in _ALSO.items():
            if alias in named and alias not in takes and name in takes and name not in named:
                named[name] = named.pop(alias)
        if "progress" in takes and "progress" not in named and len(values) <= list(takes).index("progress"):
            from edgeq.util.progress import default_progress

            named["progress"] = default_progress()
        try:
            with ExitStack() as stack:
                if takes_models:
                    values = tuple(on_disk(value, stack) for value in values)
                    named = {name: on_disk(value, stack) for name, value in named.items()}
                return function(*values, **named)
        except EdgeqError as error:
            raise error.with_traceback(None) from None

    call.__signature__ = signature  # type: ignore[attr-defined]  # what `help` and notebooks show
    return call


def expanded_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with an argument for each key of its `**options: Unpack[...]`, so that `help`
    lists them all. "..." stands for their defaults, which the docstring describes.
    """
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        hint = get_type_hints(function)[parameter.name]
        keys = get_type_hints(get_args(hint)[0]) if get_origin(hint) is Unpack else {}
        parameters += [
            inspect.Parameter(name, parameter.KEYWORD_ONLY, default=..., annotation=kind) for name, kind in keys.items()
        ]
    return signature.replace(parameters=parameters)
