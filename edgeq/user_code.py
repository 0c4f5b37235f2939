"""Functions in a user's own Python file, named "path.py:function": preprocessing, tasks, decoders."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from edgeq.errors import EdgeqError

_PREFIX = "edgeq_user_"


def names_function(name: str) -> bool:
    """Whether `name` has the form "path.py:function"."""
    return ".py:" in name


def load_function(name: str, what: str, error: type[EdgeqError]) -> Callable[..., Any]:
    """The function that `name` ("path.py:function") points at. The file is run: it is the user's own code.

    Args:
        what: what it is wanted as, for messages.

    Raises:
        EdgeqError: of the kind `error`: no such file, a file that fails when run, or no such function in it.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise error(f"{path} does not exist", f"Give the {what} as path.py:function")
    function = getattr(_run(path, error), attribute, None)
    if not callable(function):
        raise error(f"{path} has no function {attribute!r}", f"Name the function that makes the {what}")
    found: Callable[..., Any] = function
    return found


def describe(error: BaseException) -> tuple[str, str]:
    """What a user's code raised, in one line with the file and line of it where they are known; and what to do."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    place = place_in(error)
    fix = f"Correct {place.partition(':')[0]}" if place else "Correct the file"
    if isinstance(error, ModuleNotFoundError):
        fix = f"Install {error.name} for the Python that runs edgeq"
    return f"{place}: {text}" if place else text, fix


def place_in(error: BaseException) -> str:
    """The last "file.py:line" of a user's file that an exception came through; "" where it came through none."""
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
    # A dataclass looks its module up by name while it is made.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as raised:  # whatever the user's file raises
        text, fix = describe(raised)
        raise error(f"{path} cannot be imported: {text}", fix) from raised
    return module
