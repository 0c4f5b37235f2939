"""Write and read records: convert frozen dataclasses to JSON and TOML, and back with every value checked.

All JSON and TOML passes through this module. A record is a frozen dataclass of this package. `plain` converts it to
JSON values. `parse` makes a record from data that may be untrusted, and msgspec checks every value against the
annotations. So no class needs a `to_dict` or `from_dict`: its fields are the format. If the JSON differs from the
dataclass, the difference is declared next to the field:

    @dataclass(frozen=True)
    class Coverage:
        int8_macs: int
        nodes: tuple[NodeRun, ...] = field(metadata=NOT_WRITTEN)   # left out of the record
        seconds: float = field(metadata=written(digits=3))

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
import re
import stat
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import lru_cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from edgeq_device.errors import DeviceError
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.plainjson import MAX_BYTES, MAX_DEPTH, parse_json
from msgspec import inspect

from edgeq.arguments import as_options
from edgeq.errors import EdgeqError, suggest

_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "int | float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}

Place = tuple[str, ...]


@lru_cache
def _type_info(kind: Any) -> inspect.Type:
    """Return msgspec's description of a class. The description is cached, because evaluating the class's annotations
    takes 10 ms.
    """
    return inspect.type_info(kind)


def _check_keys(data: Any, info: inspect.Type, place: Place, where: object, error: type[EdgeqError]) -> None:
    """Refuse the first key in `data`, at any depth, that is unknown to the type `info`. The error names the nearest
    known key.
    """
    info = _container(info, data)
    if isinstance(info, inspect.DataclassType) and isinstance(data, Mapping):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, value in data.items():
            if key not in fields:
                table = f"in [{'.'.join(place)}]" if place else "at the top"
                raise error(f"{where}: unknown key {key!r} {table}", suggest(str(key), fields))
            _check_keys(value, fields[key], (*place, str(key)), where, error)
    elif isinstance(info, inspect.DictType) and isinstance(data, Mapping):
        for key, value in data.items():
            _check_keys(value, info.value_type, (*place, str(key)), where, error)
    elif isinstance(info, inspect.CollectionType) and isinstance(data, list):
        for index, value in enumerate(data):
            _check_keys(value, info.item_type, (*place, str(index)), where, error)


def _container(info: inspect.Type, data: Any) -> inspect.Type:
    """Return the member of a union that fits `data`: the type for tables if `data` is a table, or else the type for
    lists.
    """
    if isinstance(info, inspect.Metadata):
        return _container(info.type, data)
    if isinstance(info, inspect.UnionType):
        wanted = inspect.DataclassType | inspect.DictType if isinstance(data, Mapping) else inspect.CollectionType
        return next((_container(t, data) for t in info.types if isinstance(t, wanted)), info)
    return info


def explained(message: str, data: Any, kind: type, where: object, error: type[EdgeqError]) -> EdgeqError:
    """Turn msgspec's message into an error with a problem and a fix."""
    found = re.fullmatch(r"(?P<problem>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", message, re.DOTALL)
    assert found is not None
    problem, got = found["problem"], re.search(r", got `(\w+)`", found["problem"])
    place, value = _found(re.findall(r"[^.\[\]]+|\.\.\.", found["path"] or ""), data, got and got[1])
    name = ".".join(place) or "the content"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return error(f"{where}: {'.'.join((*place, missing[1]))} is missing", "Add it")
    expected = re.match(r"Expected `([^`]*)`(.*?)(?:, got `\w+`)?$", problem)
    known, description = _type_at(_type_info(kind), place)
    if expected is None:
        fix = f"It can be {', '.join(known)}" if known else problem
        return error(f"{where}: {name} is {_short(value)}", fix)
    words = _WORDS.get(expected[1].removesuffix(" | null"), f"`{expected[1]}`")
    if words == "a table" and place:
        words = f"a table: [{name}]"
    if description:
        return error(f"{where}: {name} is {_short(value)}", f"Make it {description}")
    return error(f"{where}: {name} is {_short(value)}", f"Make it {words}{expected[2]}")


def _found(steps: list[str], data: Any, got: str | None) -> tuple[Place, Any]:
    """Return the place that msgspec's path names, and the value at that place.

    msgspec writes "..." instead of the key of a mapping. If the path has "...", return the first matching place with a
    value of the type `got`.
    """
    if not steps:
        return (), data
    first, rest = steps[0], steps[1:]
    if first != "...":
        inner, value = _found(rest, data[int(first)] if isinstance(data, list) else data[first], got)
        return (first, *inner), value
    tried = []
    for key in data if isinstance(data, Mapping) else range(len(data)):
        try:
            inner, value = _found(rest, data[key], got)
        except (KeyError, IndexError, TypeError):
            continue
        tried.append(((str(key), *inner), value))
    names = {"str": str, "int": int, "float": float, "bool": bool, "array": list, "object": dict, "null": type(None)}
    return next((t for t in tried if got and type(t[1]) is names.get(got)), tried[0])


def _type_at(info: inspect.Type, place: Place) -> tuple[list[str], str]:
    """Return the values that the type at `place` allows, if it lists them, and the type's description or ""."""
    description = ""
    for step in (*place, None):
        description = ""
        while isinstance(info, inspect.Metadata | inspect.UnionType):
            if isinstance(info, inspect.Metadata):
                description = (info.extra_json_schema or {}).get("description", "")
                info = info.type
            else:
                info = next((t for t in info.types if not isinstance(t, inspect.NoneType)), info.types[0])
        if isinstance(info, inspect.DataclassType) and step is not None:
            info = next(field.type for field in info.fields if field.encode_name == step)
        elif isinstance(info, inspect.DictType) and step is not None:
            info = info.value_type
        elif isinstance(info, inspect.TupleType) and step is not None:
            info = info.item_types[int(step)]
        elif isinstance(info, inspect.CollectionType) and step is not None:
            info = info.item_type
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else [], description


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


Finite = Annotated[float, msgspec.Meta(ge=-1e200, le=1e200)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e200)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e200)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
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

NOT_WRITTEN: Metadata = MappingProxyType({"record": "left out"})
"""Metadata of a field that the record leaves out."""


def written(
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

_LARGEST_TOML = 1 << 20
# The parser's run time grows with the square of the number of parts in a key.
_MOST_DOTS = 1000


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
        _check_keys(data, _type_info(kind), (), where, error)  # type: ignore[arg-type]  # classes are hashable
    try:
        return msgspec.convert(data, kind, dec_hook=_decode)
    except msgspec.ValidationError as problem:
        raise explained(str(problem), data, kind, where, error) from problem


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
        while get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        origin, inner = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType) and type(None) in inner:
            return salvage(data, Union[tuple(i for i in inner if i is not type(None))])  # noqa: UP007
        if dataclasses.is_dataclass(kind) and isinstance(data, Mapping):
            hints = get_type_hints(kind, include_extras=True)
            known = {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.name in data}
            found = dict(_salvaged((name, data[name], hint) for name, hint in known.items()))
            for one in dataclasses.fields(kind):
                if one.name not in found and dataclasses.MISSING is one.default is one.default_factory:
                    raise
            return kind(**found)  # type: ignore[operator]
        if isinstance(data, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
            return dict(_salvaged((key, value, inner[1]) for key, value in data.items() if isinstance(key, str)))
        if isinstance(data, list | tuple) and origin in (tuple, list):
            return origin(value for _, value in _salvaged(("", item, inner[0]) for item in data))
        raise


def readable(data: Any, kind: type[T]) -> T | None:
    """Return the result of `salvage`, or None if nothing can be read."""
    try:
        found: T = salvage(data, kind)
    except ValueError:
        return None
    return found


def _salvaged(items: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value, kind in items:
        try:
            found = salvage(value, kind)
        except ValueError:
            continue
        yield name, found


def read_json(path: Path, kind: type[T], error: type[EdgeqError], fix: str) -> T:
    """Return the record in a JSON file, which may be untrusted. The file's size and depth are limited.

    Raises:
        EdgeqError: the file cannot be read as this record. The exception is an instance of `error`, with `fix` as its
            advice if the file is not JSON at all.
    """
    return parse(json_object(path, error, fix), kind, path, error)


def json_object(path: Path, error: type[EdgeqError], fix: str) -> dict[str, Any]:
    """Return the JSON object in a file, which may be untrusted. The file's size and depth are limited, and duplicate
    keys and NaN are refused.

    Raises:
        EdgeqError: the file contains no such object. The exception is an instance of `error`, with `fix` as its advice.
    """
    try:
        if is_longer(path, MAX_BYTES):
            raise error(f"{path} is larger than {MAX_BYTES} bytes", fix)
        return parse_json(read_file(path), str(path))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", fix) from problem
    except DeviceError as problem:
        raise error(problem.problem, fix) from problem


def is_longer(path: Path, most: int) -> bool:
    """Return whether a file has more than `most` bytes, or is endless like /dev/zero."""
    found = path.stat()
    return found.st_size > most or stat.S_ISCHR(found.st_mode)


def read_toml(path: Path, kind: type[T], error: type[EdgeqError], fix: str, *, unknown_keys: bool = False) -> T:
    """Return the record in a TOML file, which may be untrusted. See `toml_table` and `parse`.

    Raises:
        EdgeqError: the file cannot be read as this record. The exception is an instance of `error`, with `fix` as its
            advice if the file is not TOML at all.
    """
    return parse(toml_table(path, error, fix), kind, path, error, unknown_keys=unknown_keys)


def is_toml(given: str) -> bool:
    """Return whether a user's argument is a TOML file rather than a name: it ends in .toml, in upper or lower case."""
    return given.lower().endswith(".toml")


def toml_table(path: Path, error: type[EdgeqError], fix: str) -> dict[str, Any]:
    """Return the content of a TOML file of at most 1 MiB, which may be untrusted.

    Raises:
        EdgeqError: the file cannot be read as TOML. The exception is an instance of `error`, with `fix` as its advice.
    """
    try:
        with open_file(path) as stream:
            content = stream.read(_LARGEST_TOML + 1)
        if len(content) > _LARGEST_TOML:
            raise error(f"{path} is larger than 1 MiB", fix)
        if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
            raise error(f"{path} has a line of more than {_MOST_DOTS} dots", fix)
        found = tomllib.loads(content.decode("utf-8-sig"))  # Windows PowerShell writes a byte order mark
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", fix) from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text", fix) from problem
    except ValueError as problem:  # either a TOMLDecodeError, or the error for a number with thousands of digits
        raise error(f"{path} is not TOML: {problem}", "Correct it there") from problem
    except RecursionError as problem:
        raise error(f"{path} is nested too deeply", fix) from problem
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _items(value)]
    if level:
        raise error(f"{path} is nested too deeply", fix)
    return found


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _decode(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
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
    return _plain(value, as_options)


def marked(value: Any) -> Any:
    """Convert `value` as `plain` does, but keep the marks of arguments, for a reader who chooses the words."""
    return _plain(value, lambda text: text)


def _plain(value: Any, words: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return words(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, words) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(_plain(item, words) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item, words) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.integer):
        return int(value)
    if hasattr(value, "__record__"):
        return _plain(value.__record__(), words)
    if hasattr(value, "to_dict"):  # classes of edgeq_device have this method, because they do not use this module
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return dict(_entries(value, words))
    raise TypeError(f"{type(value).__qualname__} is not a record")


def _entries(value: Any, words: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        item, form = getattr(value, field.name), field.metadata.get("form")
        if "record" not in field.metadata:
            name = field.metadata.get("name") or field.name
            yield name, _plain(item if form is None or item is None else form(item), words)
    for name in _computed(type(value)):
        yield name, _plain(getattr(value, name), words)


def _computed(kind: type) -> tuple[str, ...]:
    return tuple(n for base in reversed(kind.__mro__) for n, found in vars(base).items() if isinstance(found, computed))


def fingerprint(value: Any) -> str:
    """Return 32 hexadecimal digits that identify a record. They come from the SHA-256 of its JSON with sorted keys."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:32]


def rounded(value: Any, digits: int) -> Any:
    """Return plain data with floats rounded to `digits` significant digits. NaN and the infinities become None."""
    if isinstance(value, float):
        return float(f"{value:.{digits - 1}e}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value
