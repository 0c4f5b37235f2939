"""Picking values out of plain data that anybody may have written: what is not as expected is as good as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TEXT_LIMIT = 2000


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) < 1e200 else None


def positive(value: object) -> float | None:
    """A number above zero, else None."""
    found = number(value)
    return found if found is not None and found > 0 else None


def whole(value: object) -> int | None:
    """A number from 0 up, rounded, else None."""
    found = number(value)
    return round(found) if found is not None and found >= 0 else None


def string(value: object) -> str:
    """Text, numbers and booleans as text, else ""."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int | float):
        return str(value)[:TEXT_LIMIT] if not isinstance(value, int) or abs(value) < 1 << 64 else ""
    return ""


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def rows(value: object, limit: int) -> list[Mapping[str, Any]]:
    """The mappings in a list, at most `limit` of them."""
    return [item for item in listed(value)[:limit] if isinstance(item, Mapping)]


def listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def strings(value: object, limit: int) -> tuple[str, ...]:
    """The non-empty texts in a list, at most `limit`."""
    return tuple(found for found in map(string, listed(value)[:limit]) if found)


def pairs(value: object, limit: int) -> tuple[tuple[str, str], ...]:
    """A mapping's items as text: lists joined, mappings as k=v, empty ones left out; at most `limit`."""
    found = []
    for key, item in list(mapping(value).items())[:limit]:
        shown = _shown(item)
        if shown:
            found.append((string(key), shown))
    return tuple(found)


def _shown(item: object) -> str:
    if isinstance(item, Mapping):
        inner = list(item.items())
        joined = ", ".join(f"{string(k)}={string(v)}" for k, v in inner[:12])
    elif isinstance(item, list | tuple):
        inner = list(item)
        joined = ", ".join(string(v) for v in inner[:12])
    else:
        return string(item)
    return f"{joined} and {len(inner) - 12} more" if len(inner) > 12 else joined
