"""Values as C source text. Nothing from a model's file reaches C except through these: names become comments of
harmless characters, and identifiers are made here, never taken over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_LINE = 110
_NAME_LENGTH = 60


def harmless(name: str) -> str:
    """A name from a model, fit for a comment: letters, digits, and _ . : - ; the rest becomes _, the end is cut."""
    kept = re.sub(r"[^A-Za-z0-9_.:-]", "_", name)
    return kept if len(kept) <= _NAME_LENGTH else kept[: _NAME_LENGTH - 3] + "..."


def float_literal(value: float) -> str:
    """The float32 as a C constant that reads back to the same bits: nine significant digits are enough for that.

    Raises:
        ValueError: it is not finite.
    """
    single = np.float32(value)
    if not np.isfinite(single):
        raise ValueError(f"{value} is not finite")
    text = f"{float(single):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def int_literal(value: int) -> str:
    """-2147483648 is no constant in C: its digits do not fit before the sign is looked at."""
    return "(-2147483647 - 1)" if value == -(2**31) else str(value)


def designated(fields: Mapping[str, str | int | bool]) -> str:
    """{.a = 1, .b = 2.5f}: an initialiser that does not depend on the order of a structure's fields."""
    texts = ((k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in fields.items())
    return "{" + ", ".join(f".{key} = {value}" for key, value in texts) + "}"


def dimensions(shape: Sequence[int]) -> str:
    """A shape as a C declarator has it: [2][3]."""
    return "".join(f"[{extent}]" for extent in shape)


def array(kind: str, name: str, values: NDArray[np.generic], align: str = "") -> str:
    """A constant array with the shape of `values`, one pair of braces a row."""
    aligned = f" {align}" if align else ""
    return f"static const {kind} {name}{dimensions(values.shape)}{aligned} = {_braced(values)};\n"


def _braced(values: NDArray[np.generic]) -> str:
    if values.ndim > 1:
        return "{\n" + ",\n".join(_braced(row) for row in values) + "\n}"
    return "{" + "\n".join(wrapped(int_literal(v) for v in values.tolist())) + "}"


def buffer(name: str, shape: Sequence[int]) -> str:
    """The declaration of a static elem_t array without values."""
    return f"static elem_t {name}{dimensions(shape)} row_align(1);\n"


def wrapped(items: Iterable[str]) -> Iterable[str]:
    """`items` with commas, in lines of a sane length."""
    line: list[str] = []
    length = 0
    for item in items:
        if length + len(item) > _LINE:
            yield ",".join(line) + ","
            line, length = [], 0
        line.append(item)
        length += len(item) + 1
    yield ",".join(line)
