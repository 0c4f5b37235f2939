"""Load functions from a user's own Python files, and describe the errors in them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeq.errors import EdgeqError

# Marks modules that come from a user's file, so that a traceback tells whose code failed.
_PREFIX = "edgeq_user_"


def names_function(name: str) -> bool:
    """Return whether `name` has the form "path.py:function"."""
    return ".py:" in name


def find_user_file(name: str, purpose: str, error: type[EdgeqError]) -> tuple[Path, str]:
    """Return the file and the function of `name` ("path.py:function"), without running the file.

    Args:
        purpose: the purpose of the function, for messages.

    Raises:
        EdgeqError: the file does not exist. The exception is an instance of `error`.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"{path} does not exist", f"Give the {purpose} as path.py:function")
    return path, attribute


def load_function(name: str, purpose: str, error: type[EdgeqError]) -> Callable[..., Any]:
    """Return the function that `name` ("path.py:function") refers to. This runs the file, which is the user's own code.

    Args:
        purpose: the purpose of the function, for messages.

    Raises:
        EdgeqError: the file does not exist, fails when it runs, or has no such function. The exception is an instance
            of `error`.
    """
    path, attribute = find_user_file(name, purpose, error)
    # The file must run before its names exist.
    function = getattr(_run(path, error), attribute, None)
    if not callable(function):
        raise error(f"{path} has no function {attribute!r}", f"Name the function that makes the {purpose}")
    loaded: Callable[..., Any] = function
    return loaded


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return two texts for an error in a user's code: one line with the error and, if known, its file and line; and a
    fix.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    place = find_place(error)
    fix = f"Correct {place.partition(':')[0]}" if place else "Correct the file"
    # The file is right, but this Python lacks a package, so correcting the file would not help.
    if isinstance(error, ModuleNotFoundError):
        fix = f"Install {error.name} for the Python that runs edgeq"
    return f"{place}: {text}" if place else text, fix


def find_place(error: BaseException) -> str:
    """Return the last place in a user's file that an exception's traceback names, as "file.py:line", or "" if there is
    none.
    """
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith(_PREFIX)
    ]
    return places[-1] if places else ""


def _run(path: Path, error: type[EdgeqError]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # While a dataclass is being defined, it looks up its module by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as raised:  # the user's file can raise any exception
        text, fix = describe_error(raised)
        raise error(f"{path} cannot be imported: {text}", fix) from raised
    return module
