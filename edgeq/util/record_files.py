"""Read records from JSON and TOML files, which may be untrusted.

Before a parser sees a file, its size is checked, because parsers take memory and time for whatever they get.
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgeq_device.errors import DeviceError
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.plainjson import MAX_BYTES, MAX_DEPTH, parse_json

from edgeq.errors import EdgeqError
from edgeq.util.records import T, parse

# Targets and profiles have a few kilobytes. A larger file is not one of them.
_LARGEST_TOML = 1 << 20
# The parser's run time grows with the square of the number of parts in a key.
_MOST_DOTS = 1000


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
            # Check the size first, because a parser needs many times the size of the file in memory.
            raise error(f"{path} is larger than {MAX_BYTES} bytes", fix)
        return parse_json(read_file(path), str(path))
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", fix) from problem
    except DeviceError as problem:
        raise error(problem.problem, fix) from problem


def is_longer(path: Path, limit: int) -> bool:
    """Return whether a file has more than `limit` bytes, or is endless like /dev/zero."""
    status = path.stat()
    # A device such as /dev/zero has the size 0 and never ends.
    return status.st_size > limit or stat.S_ISCHR(status.st_mode)


def read_toml(path: Path, kind: type[T], error: type[EdgeqError], fix: str, *, unknown_keys: bool = False) -> T:
    """Return the record in a TOML file, which may be untrusted. See `toml_table` and `parse`.

    Raises:
        EdgeqError: the file cannot be read as this record. The exception is an instance of `error`, with `fix` as its
            advice if the file is not TOML at all.
    """
    return parse(toml_table(path, error, fix), kind, path, error, unknown_keys=unknown_keys)


def is_toml(name: str) -> bool:
    """Return whether a user's argument is a TOML file rather than a name: it ends in .toml, in upper or lower case."""
    return name.lower().endswith(".toml")


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
        table = tomllib.loads(content.decode("utf-8-sig"))  # Windows PowerShell writes a byte order mark
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}", fix) from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text", fix) from problem
    except ValueError as problem:  # either a TOMLDecodeError, or the error for a number with thousands of digits
        raise error(f"{path} is not TOML: {problem}", "Correct it there") from problem
    except RecursionError as problem:
        raise error(f"{path} is nested too deeply", fix) from problem
    # The parser takes any depth, but code that walks through the table is recursive.
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _items(value)]
    if level:
        raise error(f"{path} is nested too deeply", fix)
    return table


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
