"""Records as JSON holds them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np

from edgeq.records.fields import computed


def plain(value: Any) -> Any:
    """`value` as JSON holds it: dict, list, str, int, float, bool, None.

    Fields keep their order, sets are sorted, paths become text, and numbers that JSON does not have (NaN and the
    infinities) become None.

    Raises:
        TypeError: something in it is no record.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.integer):
        return int(value)
    if hasattr(value, "__record__"):
        return plain(value.__record__())
    if hasattr(value, "to_dict"):  # the device side, which stands alone
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return dict(_items(value))
    raise TypeError(f"{type(value).__qualname__} is no record")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        item, form = getattr(value, field.name), field.metadata.get("form")
        if "record" not in field.metadata:
            name = field.metadata.get("name") or field.name
            yield name, plain(item if form is None or item is None else form(item))
    for name in _computed(type(value)):
        yield name, plain(getattr(value, name))


def _computed(kind: type) -> tuple[str, ...]:
    return tuple(n for base in reversed(kind.__mro__) for n, found in vars(base).items() if isinstance(found, computed))


def fingerprint(value: Any) -> str:
    """What distinguishes a record from others: 32 hexadecimal digits of the SHA-256 of its JSON, keys sorted."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:32]


def rounded(value: Any, digits: int) -> Any:
    """Plain data with its floats cut to significant digits; those that JSON does not have become None."""
    if isinstance(value, float):
        return float(f"{value:.{digits - 1}e}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value
