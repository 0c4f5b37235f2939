"""Parse JSON from untrusted input. Size and depth are limited, and duplicate keys, NaN and numbers of a million digits
are refused.
"""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Optional, Tuple

from edgeq_device.errors import BundleError

MAX_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 40
# The time that Python takes for digits grows with their square.
_MAX_DIGITS = 30


def parse_json(data: bytes, context: str, *, values: Optional[int] = None, halves: bool = False) -> Dict[str, Any]:
    """Return the JSON object in `data` (UTF-8).

    Args:
        context: name of the file in messages.
        values: maximum number of values; None: as many as the size allows.
        halves: True to accept half a character (a lone surrogate), which may occur in file names that are not text.

    Raises:
        BundleError: the text is too large or too deep, is not a JSON object, contains a key twice, or contains a number
            that JSON does not allow.
    """
    if len(data) > MAX_BYTES:
        raise BundleError(f"{context} is larger than {MAX_BYTES} bytes")
    # Check this before parsing: an empty list takes 3 bytes of text and 64 of memory.
    if values is not None and sum(map(data.count, (b",", b":", b"[", b"{"))) > values:
        raise BundleError(f"{context} has more than {values} values")
    _check_depth(data, context)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise BundleError(f"{context} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise BundleError(f"{context} is not a JSON object")
    # Python accepts lone surrogates, but no text with them can be written.
    if not halves and (b"\\ud" in data or b"\\uD" in data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BundleError(f"{context} contains half a character (a lone surrogate)") from error
    return value


def _check_depth(data: bytes, context: str) -> None:
    # Check this before parsing: Python's parser recurses, and a deep file would end in a RecursionError or worse.
    # Nearly every file ends here, without the loop over its bytes.
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in (0x5B, 0x7B):
            depth += 1
            if depth > MAX_DEPTH:
                raise BundleError(f"{context} is nested more than {MAX_DEPTH} levels deep")
        elif byte in (0x5D, 0x7D):
            depth -= 1


def _refuse_duplicates(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} appears twice")
        values[key] = value
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError("a number has too many digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value
