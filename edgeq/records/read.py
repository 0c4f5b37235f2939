"""Records from data that may be untrusted, checked against the annotations; JSON and TOML files within bounds."""

from __future__ import annotations

import dataclasses
import math
import stat
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import MAX_BYTES, MAX_DEPTH, parse_json

from edgeq.errors import EdgeqError
from edgeq.records.explain import check_keys, explained
from edgeq.records.fields import NullIsInfinite

T = TypeVar("T")

_LARGEST_TOML = 1 << 20
# The parser takes time in proportion to the square of a key's parts.
_MOST_DOTS = 1000


def parse(
    data: Any, kind: type[T], where: object, error: type[EdgeqError] = EdgeqError, *, unknown_keys: bool = True
) -> T:
    """The record of type `kind` in plain `data`; every value is checked against its annotation.

    Args:
        where: the file, for messages.
        error: what to raise.
        unknown_keys: whether keys that `kind` does not have are passed over.

    Raises:
        EdgeqError: of the type `error`: which value is not as it should be, and what it should be.
    """
    if not unknown_keys:
        check_keys(data, kind, where, error)
    try:
        return msgspec.convert(data, kind, dec_hook=_decode)
    except msgspec.ValidationError as problem:
        raise explained(str(problem), data, kind, where, error) from problem


def salvage(data: Any, kind: Any) -> Any:
    """What can be read of untrusted data: like `parse`, but a value that is not as it should be is left out, in a field
    with its default, in a list or mapping altogether.

    Raises:
        ValueError: nothing of it can be read: it is of the wrong type, or what `kind` requires is not good.
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
            missing = [f.name for f in dataclasses.fields(kind) if f.name not in found and _required(f)]
            if missing:
                raise
            return kind(**found)  # type: ignore[operator]
        if isinstance(data, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
            return dict(_salvaged((key, value, inner[1]) for key, value in data.items() if isinstance(key, str)))
        if isinstance(data, list | tuple) and origin in (tuple, list):
            return origin(value for _, value in _salvaged(("", item, inner[0]) for item in data))
        raise


def readable(data: Any, kind: type[T]) -> T | None:
    """What `salvage` gives; None where nothing can be read."""
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


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def read_json(path: Path, kind: type[T], error: type[EdgeqError], fix: str) -> T:
    """The record in a JSON file, which may be untrusted: bounded in size and depth.

    Raises:
        EdgeqError: of the type `error`; `fix` is its advice where the file is not JSON at all.
    """
    return parse(json_object(path, error, fix), kind, path, error)


def json_object(path: Path, error: type[EdgeqError], fix: str) -> dict[str, Any]:
    """The JSON object in a file, which may be untrusted: bounded in size and depth, no key twice, no NaN.

    Raises:
        EdgeqError: of the type `error`, with the advice `fix`.
    """
    try:
        if is_longer(path, MAX_BYTES):
            raise error(f"{path} is larger than {MAX_BYTES} bytes", fix)
        return parse_json(path.read_bytes(), str(path))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", fix) from problem
    except DeviceError as problem:
        raise error(problem.problem, fix) from problem


def is_longer(path: Path, most: int) -> bool:
    """Whether a file has more than `most` bytes, or has no end, as a link to /dev/zero."""
    found = path.stat()
    return found.st_size > most or stat.S_ISCHR(found.st_mode)


def read_toml(path: Path, kind: type[T], error: type[EdgeqError], fix: str, *, unknown_keys: bool = False) -> T:
    """The record in a TOML file, which may be untrusted: see `toml_table` and `parse`.

    Raises:
        EdgeqError: of the type `error`; `fix` is its advice where the file is not TOML at all.
    """
    return parse(toml_table(path, error, fix), kind, path, error, unknown_keys=unknown_keys)


def is_toml(given: str) -> bool:
    """Whether what a user named is a TOML file and no name of something: it ends in .toml, in either case."""
    return given.lower().endswith(".toml")


def toml_table(path: Path, error: type[EdgeqError], fix: str) -> dict[str, Any]:
    """The content of a TOML file of at most 1 MiB, which may be untrusted.

    Raises:
        EdgeqError: of the type `error`, with the advice `fix`.
    """
    try:
        with path.open("rb") as stream:
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
    except ValueError as problem:  # TOMLDecodeError, or a number of thousands of digits
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
