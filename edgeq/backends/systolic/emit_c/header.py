"""gemmini_params.h: our own for an array, and a chip's own, which has to agree with the target."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.errors import HardwareError

_OURS = Path(__file__).parent / "c" / "portable" / "include" / "gemmini_params.h"
_LIMIT = 1 << 20
_BANKS = 4


def own_header(array: ArrayConfig) -> str:
    """The header for `array`, whose numbers are the target's."""
    text = _OURS.read_text()
    numbers = {
        "DIM": array.dim,
        "BANK_NUM": _BANKS,
        "BANK_ROWS": array.scratchpad_rows // _BANKS,
        "ACC_ROWS": array.accumulator_rows,
        "MAX_BYTES": array.max_bytes,
    }
    for name, value in numbers.items():
        text = re.sub(rf"(?m)^#define {name} .*$", f"#define {name} {value}", text)
    if array.output_scale == "shift":
        text = text.replace("typedef float acc_scale_t;", "typedef int32_t acc_scale_t; /* shifts right */")
        text = text.replace("#define ACC_SCALE_T_IS_FLOAT\n", "")
        text = text.replace("#define ACC_SCALE_IDENTITY 1.0", "#define ACC_SCALE_IDENTITY 0")
    return text


def read_header(path: Path, array: ArrayConfig) -> tuple[str, ArrayConfig, tuple[str, ...]]:
    """A chip's generated gemmini_params.h, after checking it against the target.

    Returns:
        Its text, the target's array with the header's memories, and notes on where those differ.

    Raises:
        HardwareError: unreadable, no such header, or another array than the target's; names the line to look at.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_LIMIT + 1)
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}", "Pass the gemmini_params.h of your chip") from error
    if len(raw) > _LIMIT or b"\0" in raw:
        raise HardwareError(f"{path} is no C header", "Pass the gemmini_params.h of your chip")
    text = raw.decode("utf-8", "replace")
    code = _without_comments(text)
    dim = _number(code, "DIM")
    if dim is None:
        raise HardwareError(f"{path} does not define DIM", "Pass the gemmini_params.h of your chip")
    if dim != array.dim:
        raise HardwareError(
            f"{path}: DIM is {dim}, the target's is {array.dim}",
            "Package for a target with [systolic] dim as the chip's",
        )
    for name, known in (("elem_t", "int8_t"), ("acc_t", "int32_t")):
        found = _type(code, name)
        if found != known:
            raise HardwareError(
                f"{path}: {name} is {found or 'not defined'}, the program's is {known}",
                "Only arrays of int8 elements and int32 accumulators can run it",
            )
    scale = "float" if _type(code, "acc_scale_t") == "float" else "shift"
    if scale != array.output_scale:
        kinds = {"float": "float32", "shift": "shift"}
        raise HardwareError(
            f"{path}: the output scale (acc_scale_t) is a {kinds[scale]}, the target's a {kinds[array.output_scale]}",
            f'Package for a target with [systolic] scale_type = "{kinds[scale]}"',
        )
    banks, rows, accumulator = (_number(code, name) for name in ("BANK_NUM", "BANK_ROWS", "ACC_ROWS"))
    held = replace(
        array,
        scratchpad_rows=array.scratchpad_rows if banks is None or rows is None else banks * rows,
        accumulator_rows=array.accumulator_rows if accumulator is None else accumulator,
    )
    notes = tuple(
        f"{path.name} has {getattr(held, name)} {name.replace('_', ' ')}, the target {getattr(array, name)}; "
        "the header's count is used"
        for name in ("scratchpad_rows", "accumulator_rows")
        if getattr(held, name) != getattr(array, name)
    )
    return text, held, notes


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def _number(code: str, name: str) -> int | None:
    found = re.search(rf"(?m)^[ \t]*#[ \t]*define[ \t]+{name}[ \t]+\(?(\d{{1,9}})\)?[ \t]*\r?$", code)
    return int(found[1]) if found else None


def _type(code: str, name: str) -> str | None:
    found = re.search(rf"\btypedef\s+([A-Za-z0-9_ ]+?)\s+{name}\s*;", code)
    return found[1] if found else None
