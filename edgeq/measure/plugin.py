"""A user's own task or decoder: "path.py:name" on the command line, a function in a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeq.errors import UsageError


def is_plugin(name: str) -> bool:
    """Whether `name` has the form "path.py:name"."""
    return ".py:" in name


def load_plugin(name: str, what: str) -> Callable[..., Any]:
    """The function that `name` ("path.py:function") points at. The file is run: it is the user's own code.

    Raises:
        UsageError: no such file, a file that fails when run, or no such function in it; `what` names what was sought.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{what} file {path} does not exist", "Give it as path.py:function")
    spec = importlib.util.spec_from_file_location(f"edgeq_user_task_{path.stem}", path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name while it is made.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise UsageError(f"{what} file {path} fails: {type(error).__name__}: {error}", "Correct the file") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {attribute!r}", f"Name the function that makes the {what}")
    found: Callable[..., Any] = function
    return found
