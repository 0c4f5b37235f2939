"""Write values as C source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_LINE = 110

# Names of exported nodes may be paths of hundreds of characters.
_NAME_LENGTH = 60


def harmless(name: str) -> str:
    """Return a name that is safe in a C comment. All characters but letters, digits and _ . : - become _.

    Names that are too long are cut.
    """
    # A name could end the comment, or continue a line with a backslash.
    cleaned = re.sub(r"[^A-Za-z0-9_.:-]", "_", name)
    return cleaned if len(cleaned) <= _NAME_LENGTH else cleaned[: _NAME_LENGTH - 3] + "..."


def float_literal(value: float) -> str:
    """Return a C constant with the same float32 bits. Nine significant digits are enough for that.

    Raises:
        ValueError: the value is not finite.
    """
    single = np.float32(value)
    # C has no literal for these, and no scale is one.
    if not np.isfinite(single):
        raise ValueError(f"{value} is not finite")
    text = f"{float(single):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def int_literal(value: int) -> str:
    """Return an integer as C source.

    -2147483648 becomes an expression, because C reads it as the negative of 2147483648, which does not fit an int32.
    """
    return "(-2147483647 - 1)" if value == -(2**31) else str(value)


def designated(fields: Mapping[str, str | int | bool]) -> str:
    """Return {.a = 1, .b = 2.5f}, an initialiser that does not depend on the order of a structure's fields."""
    texts = ((k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in fields.items())
    return "{" + ", ".join(f".{key} = {value}" for key, value in texts) + "}"


def dimensions(shape: Sequence[int]) -> str:
    """Return a shape as the dimensions of a C declaration: [2][3]."""
    return "".join(f"[{extent}]" for extent in shape)


def array(kind: str, name: str, values: NDArray[np.generic], align: str = "") -> str:
    """Return a constant array with the shape of `values`, with a pair of braces for each row."""
    aligned = f" {align}" if align else ""
    return f"static const {kind} {name}{dimensions(values.shape)}{aligned} = {_braced(values)};\n"


def _braced(values: NDArray[np.generic]) -> str:
    if values.ndim > 1:
        return "{\n" + ",\n".join(_braced(row) for row in values) + "\n}"
    return "{" + "\n".join(wrapped(int_literal(v) for v in values.tolist())) + "}"


def buffer(name: str, shape: Sequence[int]) -> str:
    """Return the declaration of a static elem_t array without values."""
    return f"static elem_t {name}{dimensions(shape)} row_align(1);\n"


def wrapped(items: Iterable[str]) -> Iterable[str]:
    """Yield lines of limited length that contain `items`, separated by commas."""
    line: list[str] = []
    length = 0
    for item in items:
        if length + len(item) > _LINE:
            yield ",".join(line) + ","
            line, length = [], 0
        line.append(item)
        length += len(item) + 1
    yield ",".join(line)
