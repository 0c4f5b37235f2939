"""Write and read records: convert frozen dataclasses to JSON and TOML, and back with every value checked.

All JSON and TOML passes through this module; `edgeq.util.record_files` reads files. A record is a frozen dataclass of
this package. `plain` converts it to JSON values. `parse` makes a record from data that may be untrusted, and msgspec
checks every value against the annotations. So no class needs a `to_dict` or `from_dict`: its fields are the format. If
the JSON differs from the dataclass, the difference is declared next to the field:

    @dataclass(frozen=True)
    class Coverage:
        int8_macs: int
        nodes: tuple[NodeRun, ...] = field(metadata=NOT_WRITTEN)   # left out of the record
        seconds: float = field(metadata=write_as(digits=3))

        @computed                                                  # a property that is also written
        def share(self) -> float: ...

If a class's record has nothing in common with its fields, the class may define `__record__()`, which returns the
record. Such a class is never parsed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from edgeq.arguments import as_options
from edgeq.errors import EdgeqError
from edgeq.util.record_problems import check_keys, explain, type_info

# Sums and products of figures near the largest float would overflow to infinity.
Finite = Annotated[float, msgspec.Meta(ge=-1e200, le=1e200)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e200)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e200)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# numpy's integers have 64 bits.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

if TYPE_CHECKING:
    NullIsInfinite = float
    computed = property
else:

    class NullIsInfinite(float):
        """Mark a float that may be infinite. Infinity is written as null, and null is read back as infinity."""

    class computed(property):  # noqa: N801
        """Define a property that `plain` also writes, after the fields."""


Metadata = Mapping[str, Any]

_OMIT = "omit"
NOT_WRITTEN: Metadata = MappingProxyType({_OMIT: True})
"""Metadata of a field that the record leaves out."""


def write_as(
    *, name: str | None = None, digits: int | None = None, form: Callable[[Any], Any] | None = None
) -> Metadata:
    """Return the metadata for a field whose written form differs from its value in memory. None is always written as
    null.

    Args:
        name: key in the record, for types that are never parsed.
        digits: number of decimals to round to.
        form: function that returns the written form of a value.
    """
    return {"name": name, "form": form if digits is None else lambda value: round(value, digits)}


T = TypeVar("T")


def parse(
    data: Any, kind: type[T], where: object, error: type[EdgeqError] = EdgeqError, *, unknown_keys: bool = True
) -> T:
    """Make a record of type `kind` from plain `data`. Every value is checked against its annotation.

    Args:
        where: the file, for messages.
        error: class of the error to raise.
        unknown_keys: whether to ignore keys that `kind` does not have.

    Raises:
        EdgeqError: a value is wrong. The exception is an instance of `error`, and names the value and what it should
            be.
    """
    if not unknown_keys:
        check_keys(data, type_info(kind), (), where, error)  # type: ignore[arg-type]  # classes are hashable
    try:
        return msgspec.convert(data, kind, dec_hook=_decode)
    except msgspec.ValidationError as problem:
        raise explain(str(problem), data, kind, where, error) from problem


def salvage(data: Any, kind: Any) -> Any:
    """Return the readable part of untrusted data.

    This is like `parse`, but drops invalid values. A field with an invalid value gets its default. An invalid element
    of a list or mapping is removed.

    Raises:
        ValueError: nothing can be read: `data` has the wrong type, or a required field of `kind` is invalid.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=_decode)
    except (msgspec.ValidationError, RecursionError):
        # The limits on the whole value have failed already. Its parts may be fine.
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        origin, inner = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType) and type(None) in inner:
            return salvage(data, Union[tuple(i for i in inner if i is not type(None))])  # noqa: UP007
        if dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
            hints = get_type_hints(kind, include_extras=True)
            fields = {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.name in data}
            values = dict(_salvaged((name, data[name], hint) for name, hint in fields.items()))
            for field in dataclasses.fields(kind):
                if field.name not in values and dataclasses.MISSING is field.default is field.default_factory:
                    raise
            return kind(**values)  # type: ignore[operator]
        if isinstance(data, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
            return dict(_salvaged((key, value, inner[1]) for key, value in data.items() if isinstance(key, str)))
        if isinstance(data, list | tuple) and origin in (tuple, list):
            return origin(value for _, value in _salvaged(("", item, inner[0]) for item in data))
        raise


def readable(data: Any, kind: type[T]) -> T | None:
    """Return the result of `salvage`, or None if nothing can be read."""
    try:
        salvaged: T = salvage(data, kind)
    except ValueError:
        return None
    return salvaged


def _salvaged(items: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value, kind in items:
        try:
            salvaged = salvage(value, kind)
        except ValueError:
            continue
        yield name, salvaged


def _decode(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    # JSON has no infinity, so records contain null instead.
    if kind is NullIsInfinite and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
        try:
            return kind(math.inf if value is None else value)
        except OverflowError as error:
            raise ValueError("Number out of range") from error
    raise ValueError(f"Expected `{'float | null' if kind is NullIsInfinite else 'str'}`, got `{type(value).__name__}`")


def plain(value: Any) -> Any:
    """Convert `value` to the types that JSON has: dict, list, str, int, float, bool and None.

    Fields keep their order, sets are sorted, and paths become text. Numbers that JSON does not have (NaN and the
    infinities) become None. In sentences, arguments become the command line's options.

    Raises:
        TypeError: `value` contains something that is not a record.
    """
    return _convert(value, as_options)


def marked(value: Any) -> Any:
    """Convert `value` as `plain` does, but keep the marks of arguments, for a reader who chooses the words."""
    return _convert(value, lambda text: text)


def _convert(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return words(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _convert(item, words) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(_convert(item, words) for item in value)
    if isinstance(value, list | tuple):
        return [_convert(item, words) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.integer):
        return int(value)
    if hasattr(value, "__record__"):
        return _convert(value.__record__(), words)
    if hasattr(value, "to_dict"):  # classes of edgeq_device have this method, because they do not use this module
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return dict(_entries(value, words))
    raise TypeError(f"{type(value).__qualname__} is not a record")


def _entries(value: Any, words: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        item, form = getattr(value, field.name), field.metadata.get("form")
        if _OMIT not in field.metadata:
            name = field.metadata.get("name") or field.name
            yield name, _convert(item if form is None or item is None else form(item), words)
    for name in _computed(type(value)):
        yield name, _convert(getattr(value, name), words)


def _computed(kind: type) -> tuple[str, ...]:
    return tuple(
        n for base in reversed(kind.__mro__) for n, attribute in vars(base).items() if isinstance(attribute, computed)
    )


def fingerprint(value: Any) -> str:
    """Return 32 hexadecimal digits that identify a record. They come from the SHA-256 of its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:32]


def round_floats(value: Any, digits: int) -> Any:
    """Return plain data with floats rounded to `digits` significant digits. NaN and the infinities become None."""
    if isinstance(value, float):
        return float(f"{value:.{digits - 1}e}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): round_floats(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [round_floats(item, digits) for item in value]
    return value
