"""Read labels that do not come with the samples: from file names, from a file of labels, or from Python.

    none                    no labels, even if the reader found some
    folder                  class sub-folders (the default if there are such folders)
    name:{label}_*          the part of the file name (with or without its suffix) at the place of {label}; * is any
                            text, and digits become an integer
    name                    the file name without its suffix, as text, such as the text of a line in the image
    FOLDER                  one file of the sample's name for each sample: a mask, a target image or a text. The label
                            is its path
    FILE.csv / .txt         lines of name and label, "name,label" or "name label". Other columns, or another order, need
                            a header line that calls one column label (or class). Lines with only numbers are labels by
                            position
    FILE.json               {"name": label, …} or [{"name": …, "label": …}, …]
    FILE.npy / IDX          one label per sample, by position

A name in a file is the path below the data folder, the file name, or the file name without its suffix.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from edgeq.data.arrays import ArrayFile, damage, is_idx, load_labels
from edgeq.data.label_folders import label_by_files
from edgeq.data.limits import read_text
from edgeq.data.records import FileList, Hash, Record, Rows
from edgeq.data.sample import plain_label
from edgeq.errors import DataError


@dataclass(frozen=True)
class Labels:
    """Hold labels together with the classes that they name.

    Attributes:
        source: source of the labels, as in `load_labels_from`, or None to use the labels that come with the data.
        classes: list of classes, as in `edgeq.data.classes.load_classes`.
    """

    source: Any = None
    classes: Any = None


LabelOf = Callable[[int, Record], Any]
"""Function from a record's index and the record to its label."""

# Names of the label column and the name column in a header line.
_LABEL_COLUMNS = ("label", "class")
_NAME_COLUMNS = ("name", "file", "filename", "file_name", "image", "path")


def load_labels_from(labels: Any, folder: Path | None, count: int, *, inside: bool = False) -> LabelOf:
    """Return a function that returns the label of a record.

    Args:
        labels: a string or path as in the module's docstring, a mapping from sample names to labels, or a sequence of
            labels by position.
        folder: the folder in which a label file with a relative path is searched if it is not in the current directory.
        count: number of records, to check labels by position.
        inside: whether the data folder itself names the label file (in a sidecar). The file must then be in `folder`.

    Raises:
        DataError: the form is unknown, the file cannot be read, or the number of labels differs from `count`.
    """
    if isinstance(labels, str) and labels == "folder":
        return _label_by_folder
    if isinstance(labels, str) and labels == "none":
        return lambda index, record: None
    if isinstance(labels, str) and labels == "name":
        return lambda index, record: PurePosixPath(str(record.context.get("file", record.name))).stem
    # Python's own values need no file and no search, so they come before any text is read as a path.
    if isinstance(labels, Mapping):
        return _label_by_name({str(name): label for name, label in labels.items()}, "the labels")
    if isinstance(labels, Sequence | np.ndarray) and not isinstance(labels, str):
        return _label_by_position([plain_label(value) for value in labels], count, "the labels")
    text = str(labels)
    if text.startswith("name:"):
        return _label_by_pattern(text.removeprefix("name:"))
    with damage(f"labels: {text[:100]}"):  # a name may be longer than file systems allow
        path = _label_path(text, folder, inside=inside)
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_folder:
        return label_by_files(path)
    return _load_file(path, count, is_file=is_file)


def _label_path(text: str, folder: Path | None, *, inside: bool) -> Path:
    path = Path(text)
    if inside:
        # The data folder may come from somebody else, so its own settings must not reach files outside it.
        if folder is None or path.is_absolute() or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise DataError(f"labels = {text!r} points outside the data folder", "Put the labels into it, or pass them")
        return folder / path
    if not path.exists() and folder is not None and (folder / path).exists():
        return folder / path
    return path


def _load_file(path: Path, count: int, *, is_file: bool) -> LabelOf:
    if not is_file:
        raise DataError(
            f"labels: {path} does not exist",
            "Give none, folder, name, name:PATTERN with {label}, a folder, or a .csv, .txt, .json, .npy or IDX file",
        )
    kind = path.suffix.lower()
    if kind == ".npy" or is_idx(path):
        with ArrayFile(path) as file:
            return _label_by_position(load_labels(file, ""), count, str(path))
    text = read_text(path, "Keep only names and labels")
    if kind == ".json":
        return _label_by_name(_parse_json(text, path), str(path))
    if kind in (".csv", ".txt", ".tsv"):
        rows = _read_rows(text, path, kind)
        # A file with only numbers gives the labels by position. One name among them means that it is another list.
        alone = [plain_label(row[0]) for row in rows if len(row) == 1]
        if rows and len(alone) == len(rows) and not any(isinstance(value, str) for value in alone):
            return _label_by_position(alone, count, str(path))
        return _label_by_name(_pair_rows(rows, path), str(path))
    raise DataError(f"labels: {path} is of no known kind", "Give .csv, .txt, .json, .npy or IDX")


def _read_rows(text: str, path: Path, kind: str) -> list[list[str]]:
    """Return the cells of every line that is not empty: either one cell, or name and label. A header line only sets the
    order of the cells.

    Raises:
        DataError: rows have more than two cells, and no header line names the label.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    commas = sum("," in line for line in lines)
    # A name may contain a comma or a space. In a .csv file, the separator is a comma if the file contains any comma. In
    # a .txt file, it is a comma only if every line contains one.
    if kind == ".tsv" or commas == len(lines) or (kind == ".csv" and commas):
        rows = read_table(text, path, "\t" if kind == ".tsv" else ",")
    else:
        # The last word is the label, so that a file name may contain spaces.
        rows = [line.rsplit(maxsplit=1) for line in lines]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    label = next((place for place, cell in enumerate(header) if cell in _LABEL_COLUMNS), None)
    if label is None:
        for number, row in enumerate(rows, 1):
            if any(cell.strip() for cell in row[2:]):
                raise DataError(
                    f"{path}: row {number} has {len(row)} cells", "Keep name,label, or call the column 'label' on top"
                )
        return rows
    columns = [place for place in range(len(header)) if place != label]
    name = next((place for place in columns if header[place] in _NAME_COLUMNS), columns[0] if columns else None)
    order = (label,) if name is None else (name, label)
    return [[row[place] for place in order if place < len(row)] for row in rows[1:]]


def read_table(text: str, path: Path, delimiter: str) -> list[list[str]]:
    """Return the rows of a table in text. A quoted cell may contain line breaks. Rows without text are left out.

    Raises:
        DataError: a row cannot be read.
    """
    with damage(path):
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    return [row for row in rows if any(cell.strip() for cell in row)]


def is_header(row: Sequence[str], column: int) -> bool:
    """Return whether `row` is a header, which means that its cell `column` names the label column."""
    return -len(row) <= column < len(row) and row[column].strip().lower() in _LABEL_COLUMNS


def _pair_rows(rows: list[list[str]], path: Path) -> dict[str, Any]:
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise DataError(f"{path}: row {number} has no label", "Write name,label in every row, or numbers alone")
    return _merge_pairs(((row[0].strip(), plain_label(row[1])) for row in rows), path)


def _merge_pairs(pairs: Iterable[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """Return a dictionary of name → label.

    Raises:
        DataError: a name has two labels.
    """
    table: dict[str, Any] = {}
    for name, label in pairs:
        if name in table and table[name] != label:
            raise DataError(f"{path}: {name!r} has two labels, {table[name]!r} and {label!r}", "Keep the right one")
        table[name] = label
    return table


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _merge_pairs(pairs, path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", "Correct the file") from error
    if isinstance(value, dict) and "annotations" in value and "images" in value:
        raise DataError(
            f"{path} contains COCO annotations, not one label per file", "Pass it as the annotations of `eval`"
        )
    if isinstance(value, dict):
        return {name: plain_label(label) for name, label in value.items()}
    if isinstance(value, list) and all(isinstance(row, dict) and "label" in row for row in value):
        names = [row.get("name", row.get("file")) for row in value]
        if all(isinstance(name, str) for name in names):
            return _merge_pairs(
                ((str(n), plain_label(row["label"])) for n, row in zip(names, value, strict=True)), path
            )
    raise DataError(f"{path} has another form", 'Write {"name": label, …} or [{"name": …, "label": …}, …]')


def _label_by_folder(index: int, record: Record) -> Any:
    if "class" not in record.context:
        raise DataError(
            f"{record.name} is in no class folder", "Put every sample into one of at least two sub-folders of the data"
        )
    return record.label


def _label_by_position(values: Sequence[Any], count: int, location: str) -> LabelOf:
    if len(values) != count:
        raise DataError(
            f"{location}: {len(values)} labels for {count} samples", "Give one label per sample, in their order"
        )
    return lambda index, record: values[index]


def _label_by_name(table: Mapping[str, Any], location: str) -> LabelOf:
    paths_by_name: dict[str, str] = {}

    def label_of(index: int, record: Record) -> Any:
        """Return the label that is listed for the record's path, its file name, or its file name without the suffix."""
        file, path = str(record.context.get("file", record.name)), str(record.context.get("path", ""))
        # The longest name is tried first, because two folders may contain files of the same name.
        for name in (path, file, PurePosixPath(file).stem):
            if name in table:
                # Without this, one label would silently count for both files.
                if paths_by_name.setdefault(name, path) != path:
                    raise DataError(
                        f"{location}: the label of {name!r} can belong to {paths_by_name[name]} or to {path}",
                        "Name both by their paths below the data folder",
                    )
                return table[name]
        raise DataError(f"{location}: no label for {path or file}", "Add it, or leave the sample out")

    return label_of


def _label_by_pattern(pattern: str) -> LabelOf:
    # The search takes time proportional to the pattern, so its length is bounded too.
    if pattern.count("{label}") != 1 or len(pattern) > 200:
        raise DataError(
            f"labels = 'name:{pattern}'", "Write {label} once at the place of the label, as in name:{label}_*"
        )

    def label_of(index: int, record: Record) -> Any:
        """Return the part of the record's file name that matches {label}."""
        file = str(record.context.get("file", record.name))
        stem, full_name = _find_label(PurePosixPath(file).stem, pattern), _find_label(file, pattern)
        label = full_name if stem is None else stem
        if label is None:
            raise DataError(f"{record.name} does not match the label pattern {pattern!r}", "Correct the pattern")
        return plain_label(label)

    return label_of


def _find_label(text: str, pattern: str) -> str | None:
    """Return the part of `text` that matches {label}, or None if `text` does not match `pattern`. From left to right,
    each * matches as little text as possible.

    The search takes time proportional to the length of `text` times the length of `pattern`. With a regular expression,
    the time could be exponential.
    """
    parts = [part for part in re.split(r"(\*|\{label\})", pattern) if part]
    # fits[j][i] is True if text[i:] matches parts[j:].
    fits = [[False] * len(text) + [True]]
    for part in reversed(parts):
        behind = fits[-1]
        if part in ("*", "{label}"):
            min_length = part != "*"
            # For each position, whether the rest of the pattern fits there or anywhere later.
            later = list(itertools.accumulate(reversed(behind), operator.or_))[::-1]
            fits.append([*later[min_length:], *[False] * min_length])
        else:
            size = len(part)
            fits.append([text.startswith(part, i) and behind[i + size] for i in range(len(text) + 1)])
    fits.reverse()
    if not fits[0][0]:
        return None
    at, label = 0, ""
    for part, behind in zip(parts, fits[1:], strict=True):
        stop = at + len(part) if part not in ("*", "{label}") else behind.index(True, at + (part != "*"))
        label = text[at:stop] if part == "{label}" else label
        at = stop
    return label


SUFFIXES = frozenset({".csv", ".txt", ".tsv"})


@dataclass(frozen=True)
class TextFile:
    """Read each line of a .txt file as one record (str), or each row of a .csv or .tsv file as one record (list of
    str).
    """

    path: Path
    lines: tuple[Any, ...]
    target: str
    label: int | None
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"
    prepared: bool = False

    def __len__(self) -> int:
        return len(self.lines)

    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the lines (or the rows of a .csv file) at `indices`, with labels from the label column."""
        for index in indices:
            line = self.lines[index]
            name = f"{self.path}:{index + 1}"
            label = None
            if self.label is not None:
                if isinstance(line, str) or not -len(line) <= self.label < len(line):
                    raise DataError(f"{name} has no column {self.label} for the label", "Correct source.label")
                label = plain_label(line[self.label])
            yield Record(name, {self.target: line}, label, {"file": self.path.name, "index": index})

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Hash the chosen lines."""
        for index in indices:
            digest.update(f"{self.lines[index]!r}\n".encode())


def open_text(path: Path, target: str, label: str | None) -> TextFile:
    """Read a whole text file (UTF-8, of limited size). Empty lines are dropped. A header line is also dropped if it
    names a column of labels.
    """
    if label is not None and not label.removeprefix("-").isdigit():
        raise DataError(f"source.label = {label!r} names no column of {path}", "Give the number of the column, from 0")
    column = None if label is None else int(label)
    text, kind = read_text(path), path.suffix.lower()
    lines: list[Any]
    if kind == ".txt":
        lines = [line for line in text.split("\n") if line.strip()]
    else:
        lines = read_table(text, path, "," if kind == ".csv" else "\t")
        # Without a named column there are no labels, so the first row is a sample like any other.
        if column is not None and lines and is_header(lines[0], column):
            lines = lines[1:]
    if not lines:
        raise DataError(f"{path} is empty", "Give one sample per line")
    return TextFile(path, tuple(lines), target, column)


@dataclass(frozen=True)
class Paths(FileList):
    """Read files as paths, which are passed to the preprocessing."""

    def item(self, path: Path) -> Path:
        """Return the path, because the preprocessing function reads the file itself."""
        return path
