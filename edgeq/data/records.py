"""Define the records that every reader returns. Records have a fixed order, and are read lazily, one file at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from edgeq_device.system.files import open_file

from edgeq.errors import DataError


def describe_file(path: Path, root: Path, classes: Mapping[str, int]) -> tuple[dict[str, Any], int | None]:
    """Return the context of a file's samples (file name, path below `root`, class folder), and the label of the class
    folder. Without `classes`, the context has no class folder and the label is None.
    """
    below = path.relative_to(root)
    context = {"file": path.name, "path": below.as_posix()}
    # Without class folders, the first folder of the path is only a folder, so it must not become a label.
    if not classes:
        return context, None
    return {**context, "class": below.parts[0]}, classes[below.parts[0]]


Rows = Literal["one", "exact", "unknown"]
"""How records fill the batch axis: each record is one row, each record is exactly the model's batch, or this is not
known before reading.
"""


@dataclass(frozen=True)
class Record:
    """Hold one item in its stored form.

    Attributes:
        name: the file name and the index in the file, for messages.
        raw: model input → raw value (array, `Picture`, path, text). If the model has several inputs, the key "" means
            that the preprocessing makes all the inputs from this value.
        label, context: the same as in `Sample`.
    """

    name: str
    raw: Mapping[str, Any]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


class Hash(Protocol):
    """Describe the methods of hashlib's objects that digests need."""

    def update(self, data: bytes, /) -> None:
        """Add `data` to the hashed bytes."""


class Source(Protocol):
    """Read records by index. Each read takes indices in ascending order."""

    @property
    def rows(self) -> Rows:
        """Return the way in which records fill the batch axis."""

    @property
    def prepared(self) -> bool:
        """Return whether the records are already model inputs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return one sentence for each choice that the reader made."""

    def __len__(self) -> int: ...
    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Return the records at `indices`, which ascend. Each record is loaded when the iterator reaches it."""

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Feed the contents of the records at `indices` to `digest`."""


@dataclass(frozen=True)
class FileList(ABC):
    """Read files. Each file is one record.

    Attributes:
        root: the folder to which names are relative.
        files: the files in the order of reading.
        target: the model input that the files feed, or "" if the preprocessing decides.
        classes: class sub-folder → label; empty if there are no class folders.
    """

    root: Path
    files: tuple[Path, ...]
    target: str
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"
    prepared: bool = False

    @abstractmethod
    def item(self, path: Path) -> Any:
        """Return the raw value of one file."""

    def __len__(self) -> int:
        return len(self.files)

    def groups(self) -> Sequence[str]:
        """Return the class folder of each file, or an empty sequence if there are no class folders."""
        # `classes` is empty unless every file is in a class folder, so the first part of each path is one.
        return [path.relative_to(self.root).parts[0] for path in self.files] if self.classes else ()

    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the files at `indices`, one at a time. A record's context contains the file name, the class folder and
        the path.
        """
        # One file at a time: a data set is usually larger than the memory.
        for path in (self.files[index] for index in indices):
            context, label = describe_file(path, self.root, self.classes)
            yield Record(str(path), {self.target: self.item(path)}, label, context)

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Hash each file's bytes and its path below the folder."""
        for path in (self.files[index] for index in indices):
            update_with_file(digest, path, path.relative_to(self.root).as_posix())


def split_indices(counts: Sequence[int], indices: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Split ascending global `indices` over files that have `counts` records.

    Yields:
        (file number, indices in that file) for each file that contains any of the indices. If `indices` is a range, the
            results are ranges.
    """
    start = lower = 0
    for number, count in enumerate(counts):
        upper = bisect_left(indices, start + count, lower)
        # `indices` ascend, so those of one file are one slice, and no index is looked at twice.
        local = indices[lower:upper]
        # A range stays a range: a list of ten million numbers would take hundreds of megabytes.
        if isinstance(local, range):
            local = range(local.start - start, local.stop - start, local.step)
        else:
            local = [index - start for index in local]
        if len(local):
            yield number, local
        start, lower = start + count, upper


def update_with_file(digest: Hash, path: Path, name: str) -> None:
    """Feed a file's name, size and bytes to `digest`."""
    try:
        # Names that are not UTF-8 contain lone surrogates.
        digest.update(f"{name}\0{path.stat().st_size}\0".encode("utf-8", "surrogatepass"))
        with open_file(path) as stream:
            # A file may be larger than the memory, so it is hashed in pieces of 1 MiB.
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
