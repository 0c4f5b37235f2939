"""A user's preprocessing function as the older calibrate.py called it: file name, height and width to an array."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeq.errors import UsageError

if TYPE_CHECKING:
    from edgeq.data.preprocess import Preprocess

_SIZES = 3
"""Arguments that a function of the older form needs: the image's file, and two sizes."""


def own_preprocess(text: str, model: Path) -> Preprocess:
    """The preprocessing "file.py:function".

    A function of one argument is edgeq's own form (see `edgeq.data.preprocess.register`). One of three gets the path of
    an image (str), and height and width of the model's first input, in the order of its arguments' names.

    Raises:
        DataError: the file or the function cannot be loaded.
        UsageError: the sizes are needed, and the model leaves them free.
    """
    from edgeq.data.preprocess import load_preprocess
    from edgeq.data.records import model_size
    from edgeq.model.load import model_signature

    loaded = load_preprocess(text)
    function = loaded.function
    assert function is not None, "it names a function"
    needed = _needed(function)
    if len(needed) < _SIZES:
        return loaded
    size = model_size(model_signature(model).inputs[0])
    if size is None:
        raise UsageError(
            f"{model} leaves its height and width free, and {text} needs them",
            "Give a function of one argument, the image as uint8 [H, W, 3]",
        )
    width, height = size
    sizes = (width, height) if needed[1].startswith("w") else (height, width)
    return replace(loaded, reads="path", function=lambda path: function(str(path), *sizes))  # type: ignore[call-arg]


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the positional arguments that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [entry.name for entry in found if entry.kind in kinds and entry.default is inspect.Parameter.empty]
