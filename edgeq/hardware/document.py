"""TOML documents with a schema, inheritance and merging: what profiles and targets have in common.

A schema is a mapping from key to what its value must be: a `Kind`, or a schema for a table. The key "*" stands for
any name. Unknown keys are refused with the file, the table and the nearest known key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgeq.errors import HardwareError, suggest

_LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Kind:
    """What a value must be: in words, and as a test."""

    description: str
    holds: Callable[[Any], bool]


Schema: TypeAlias = "Mapping[str, Kind | Schema]"

TEXT = Kind("text", lambda v: isinstance(v, str) and bool(v.strip()))
TEXTS = Kind("a list of texts", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v))
INTEGER = Kind("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool))
NUMBER = Kind("a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool))
BOOLEAN = Kind("true or false", lambda v: isinstance(v, bool))
VALUES = Kind("a list of values", lambda v: isinstance(v, list) and bool(v))
VERSION = Kind(
    'a version such as "1.20"', lambda v: isinstance(v, str) and all(part.isdecimal() for part in v.split("."))
)


@dataclass(frozen=True)
class Document:
    """One TOML file, or several merged into one: its name, its content, and the files it comes from."""

    name: str
    content: Mapping[str, Any]
    files: tuple[Path, ...]

    @property
    def file(self) -> Path:
        """The file that had the last word."""
        return self.files[-1]


def read(path: Path, schema: Schema) -> Document:
    """Read and check one file. Its name without suffix is the document's name.

    Raises:
        HardwareError: unreadable, too large, not TOML, or against the schema.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise HardwareError(f"{path} is larger than 1 MiB", "Give a profile or target in TOML")
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{path} cannot be read: {error.strerror}", "Give a readable TOML file") from error
    except UnicodeDecodeError as error:
        raise HardwareError(f"{path} is not UTF-8 text", "Give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is not TOML: {error}", "Correct it there") from error
    check(content, schema, path)
    return Document(path.stem, content, (path,))


def check(content: Mapping[str, Any], schema: Schema, path: Path, table: str = "") -> None:
    """Hold `content` against `schema`, table by table."""
    for key, value in content.items():
        expected = schema.get(key, schema.get("*"))
        where = f"in [{table}]" if table else "at the top"
        if expected is None:
            raise HardwareError(f"{path}: unknown key {key!r} {where}", suggest(key, schema))
        inner = f"{table}.{key}" if table else key
        if isinstance(expected, Kind):
            if not expected.holds(value):
                raise HardwareError(f"{path}: {inner} is {value!r}", f"Make it {expected.description}")
        elif isinstance(value, Mapping):
            check(value, expected, path, inner)
        else:
            raise HardwareError(f"{path}: {inner} is {value!r}", f"Make it a table: [{inner}]")


def read_folder(folder: Path, schema: Schema) -> dict[str, Document]:
    """Every .toml file directly in `folder`, by name; nothing where there is no such folder."""
    documents = [read(path, schema) for path in sorted(folder.glob("*.toml"))]
    return {document.name: document for document in documents}


def overlay(below: Document, above: Document) -> Document:
    """`above` over `below`: tables are merged key by key, everything else replaced."""
    return Document(above.name, merge(below.content, above.content), (*below.files, *above.files))


def overlay_all(layers: Iterable[Mapping[str, Document]]) -> dict[str, Document]:
    """Folders merged by document name, later ones over earlier ones."""
    merged: dict[str, Document] = {}
    for layer in layers:
        for name, document in layer.items():
            merged[name] = overlay(merged[name], document) if name in merged else document
    return merged


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables key by key, recursively; everything else from `above`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def version_key(version: str) -> tuple[int, ...]:
    """ "1.20" → (1, 20); what follows the leading numbers ("1.31.1rc1", "12.4+cu") is left out."""
    parts = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)
