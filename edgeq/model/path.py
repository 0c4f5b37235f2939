"""Paths as callers give them: checked before anything is done with them."""

from __future__ import annotations

import os
from pathlib import Path

from edgeq.errors import UsageError

# Type of what is often given instead of a path → how it becomes a file.
_SAVED_BY = {"ModelProto": "onnx.save(model, PATH)", "Model": "onnx_ir.save(model, PATH)"}


def path_of(given: object, what: str = "model") -> Path:
    """`given` as a path.

    Args:
        given: a str, a Path or another os.PathLike of text.
        what: it is of, for the message.

    Raises:
        UsageError: anything else, such as a model in memory.
    """
    if isinstance(given, (str, os.PathLike)):
        text = os.fspath(given)
        if isinstance(text, str):
            return Path(text)
    kind = type(given).__name__
    if isinstance(given, (bytes, bytearray, memoryview)):
        save = "Path(PATH).write_bytes(model)"
    else:
        save = _SAVED_BY.get(kind, "")
    fix = f"Save it first, {save}, and give PATH" if save else "Give a path, as str or Path"
    raise UsageError(f"the {what} is given as {kind}, and a path (str or Path) is taken", fix)
