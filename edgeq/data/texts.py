"""The readers for preprocessings of a user's own: lines of text, rows of .csv, and paths of any files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.data.labels import is_header, plain_label, table_rows
from edgeq.data.records import FileList, Hash, Record, Rows, read_text
from edgeq.errors import DataError

SUFFIXES = frozenset({".csv", ".txt", ".tsv"})


@dataclass(frozen=True)
class TextFile:
    """One record a line of .txt (str), or a row of .csv and .tsv (list of str)."""

    path: Path
    lines: tuple[Any, ...]
    target: str
    label: int | None
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"
    prepared: bool = False

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, indices: range) -> Iterator[Record]:
        """The lines (or rows of a .csv) of `indices`, with their labels from the label column."""
        for index in indices:
            line = self.lines[index]
            name = f"{self.path}:{index + 1}"
            label = None
            if self.label is not None:
                if isinstance(line, str) or not -len(line) <= self.label < len(line):
                    raise DataError(f"{name} has no column {self.label} for the label", "Correct source.label")
                label = plain_label(line[self.label])
            yield Record(name, {self.target: line}, label, {"file": self.path.name, "index": index})

    def update(self, digest: Hash, indices: range) -> None:
        """Hash the chosen lines."""
        for index in indices:
            digest.update(f"{self.lines[index]!r}\n".encode())


def open_text(path: Path, target: str, label: str | None) -> TextFile:
    """Read a text file (UTF-8, bounded) whole; empty lines are dropped, and above a column of labels its header."""
    if label is not None and not label.removeprefix("-").isdigit():
        raise DataError(f"source.label = {label!r} names no column of {path}", "Give the number of the column, from 0")
    column = None if label is None else int(label)
    text, kind = read_text(path), path.suffix.lower()
    lines: list[Any]
    if kind == ".txt":
        lines = [line for line in text.split("\n") if line.strip()]
    else:
        lines = table_rows(text, path, "," if kind == ".csv" else "\t")
        if column is not None and lines and is_header(lines[0], column):
            lines = lines[1:]
    if not lines:
        raise DataError(f"{path} is empty", "Give one sample a line")
    return TextFile(path, tuple(lines), target, column)


@dataclass(frozen=True)
class Paths(FileList):
    """Files that are given to the preprocessing as paths."""

    def item(self, path: Path) -> Path:
        """The path: the function reads the file itself."""
        return path
