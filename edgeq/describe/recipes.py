"""Write the preprocessing that a file states as the plain data that `edgeq.data.preprocess.load_preprocess` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq.describe.beside import read_numbers
from edgeq.errors import DataError

Step = Mapping[str, Any]

PILLOW = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's number of a filter → its name."""

# OpenCV's number of an interpolation, and its place in this list, which names the filter that comes closest to it.
_OPENCV = ("nearest", "bilinear", "bicubic", "box", "lanczos")


def write_recipe(
    title: str,
    geometry: Sequence[Step],
    *,
    order: str = "RGB",
    scale: float = 1.0,
    mean: Sequence[float] = (),
    deviation: Sequence[float] = (),
) -> dict[str, Any]:
    """Return steps that compute (x · scale - mean) / deviation after the steps of `geometry` on decoded RGB images."""
    steps: list[Step] = [*geometry]
    if order != "RGB":
        steps.append({"op": "channels", "order": order})
    # 255 itself is exact, and its inverse is not.
    if abs(scale * 255 - 1) < 1e-4:
        steps.append({"op": "divide", "value": 255})
    elif scale != 1:
        steps.append({"op": "multiply", "value": scale})
    if any(mean):
        steps.append({"op": "subtract", "value": _joined(mean)})
    if any(value != 1 for value in deviation):
        if not all(deviation):
            raise DataError(f"{title}: a deviation is 0", "Correct the file, or give ⟨preprocess⟩")
        steps.append({"op": "divide", "value": _joined(deviation)})
    return {"title": title, "steps": [*steps, {"op": "layout", "axes": "model"}]}


def _joined(values: Sequence[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else list(values)


def read_size(value: Any, subject: str) -> tuple[int, int]:
    """Return (width, height) from one side, or from [height, width].

    Raises:
        DataError: the value is something else.
    """
    sides = read_numbers(value, subject)
    if len(sides) > 2 or not all(side == int(side) and 1 <= side <= 65536 for side in sides):
        raise DataError(f"{subject} is {str(value)[:60]}, not a size", "Correct the file, or give ⟨preprocess⟩")
    return int(sides[-1]), int(sides[0])


def read_filter(value: Any, path: Path) -> str:
    """Return the filter that OpenCV's number or name of an interpolation stands for.

    Raises:
        DataError: the value is something else.
    """
    if type(value) is int and 0 <= value < len(_OPENCV):
        return _OPENCV[value]
    if value in _OPENCV:
        return str(value)
    raise DataError(f"{path}: {str(value)[:60]!r} is no interpolation", "Give ⟨preprocess⟩")


def resize(size: tuple[int, int], rule: str = "exact", filter: str = "bilinear", rounding: str = "floor") -> Step:
    """Return a step that resizes to (width, height), or by one side to the width of `size`."""
    side: Any = size[0] if rule in ("short", "long") else list(size)
    return {"op": "resize", "size": side, "rule": rule, "filter": filter, "rounding": rounding}


def crop(size: tuple[int, int], rounding: str = "floor") -> Step:
    """Return a step that cuts out the centre of (width, height)."""
    return {"op": "crop", "size": list(size), "rounding": rounding}
