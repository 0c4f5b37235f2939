"""Check arguments that name files."""

from __future__ import annotations

import os
from pathlib import Path

from edgeq.errors import UsageError

# Type of an object that users often pass instead of a path → the function call that saves the object to a file.
_SAVED_BY = {"ModelProto": "onnx.save(model, PATH)", "Model": "onnx_ir.save(model, PATH)"}


def path_of(argument: object, noun: str = "model") -> Path:
    """Return `argument` as a path.

    Args:
        argument: a str, a Path or another os.PathLike that contains text.
        noun: kind of file, for the message.

    Raises:
        UsageError: `argument` is anything else, such as a model in memory.
    """
    if isinstance(argument, (str, os.PathLike)):
        text = os.fspath(argument)
        if isinstance(text, str):
            return Path(text)
    kind = type(argument).__name__
    if isinstance(argument, (bytes, bytearray, memoryview)):
        save = "Path(PATH).write_bytes(model)"
    else:
        save = _SAVED_BY.get(kind, "")
    fix = f"Save it first, {save}, and give PATH" if save else "Give a path, as str or Path"
    raise UsageError(f"the {noun} is given as {kind}, and a path (str or Path) is needed", fix)
