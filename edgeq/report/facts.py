"""Mappings from a record as pairs of texts, for lists of facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Pairs = tuple[tuple[str, str], ...]
_TEXT_LIMIT = 2000
_SHOWN = 12


def pairs(values: Mapping[str, Any], limit: int) -> Pairs:
    """At most `limit` items as text: lists joined, mappings as k=v, yes and no; empty ones are left out."""
    shown = ((string(key), _shown(item)) for key, item in list(values.items())[:limit])
    return tuple((key, text) for key, text in shown if text)


def string(value: object) -> str:
    """Text, numbers and booleans as text, else ""."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else ""
    return str(value)[:_TEXT_LIMIT] if isinstance(value, str | float) and value == value else ""


def _shown(item: object) -> str:
    if isinstance(item, Mapping):
        texts = [f"{string(k)}={string(v)}" for k, v in item.items()]
    elif isinstance(item, list | tuple):
        texts = [string(v) for v in item]
    else:
        return string(item)
    joined = ", ".join(texts[:_SHOWN])
    return f"{joined} and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else joined
