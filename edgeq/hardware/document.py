"""TOML documents with inheritance and merging: what profiles and targets have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from edgeq.errors import HardwareError
from edgeq.records import is_toml, parse, toml_table

Text = Annotated[str, Meta(pattern=r"\S", description="text")]
Version = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$", description='a version such as "1.20"')]


@dataclass(frozen=True)
class Document:
    """One TOML file, or several merged into one: its name, its content, and the files it comes from."""

    name: str
    content: Mapping[str, Any]
    files: tuple[Path, ...]

    @property
    def file(self) -> Path:
        """The file whose values win."""
        return self.files[-1]


def read(path: Path, kind: type) -> Document:
    """Read and check one file. Its name without suffix is the document's name.

    Args:
        kind: the record type that says what the file may hold.

    Raises:
        HardwareError: unreadable, too large, not TOML, or not of that type.
    """
    content = toml_table(path, HardwareError, "Give a profile or target in TOML")
    parse(content, kind, path, HardwareError, unknown_keys=False)
    return Document(path.stem, content, (path,))


def read_folder(folder: Path, kind: type) -> dict[str, Document]:
    """Every .toml file directly in `folder`, by name; nothing where there is no such folder.

    Raises:
        HardwareError: as `read`; or two have one name.
    """
    found: dict[str, Document] = {}
    for document in (read(path, kind) for path in _toml_files(folder)):
        if document.name in found:
            raise HardwareError(f"{document.file} has the name of {found[document.name].file.name}", "Rename one")
        found[document.name] = document
    return found


def state_of(folders: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the .toml files in `folders`: what is read of them stays true while these do."""
    files = [path for folder in folders for path in _toml_files(folder)]
    found = ((path, path.stat() if path.exists() else path.lstat()) for path in files)
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in found)


def _toml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if is_toml(path.name))


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
