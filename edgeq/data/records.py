"""What every reader gives: records in a fixed order, read lazily, and the bounds on what is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from edgeq_device.budget import VARIABLE, largest_sample

from edgeq.data.class_folders import place
from edgeq.errors import DataError
from edgeq.records import is_longer

MAX_PIXELS = 1 << 26
"""The most pixels of one image (64 M): above it, a decompression bomb."""

MAX_TEXT_BYTES = 1 << 26
"""The most that a file of labels or text lines may take."""

MAX_CELLS = 1 << 23
"""The most lines and cells in one: each becomes an object of Python's, however short it is."""

_SEPARATORS = ",\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

MAX_FILES = 10_000_000

Rows = Literal["one", "exact", "unknown"]
"""How records fill the batch axis: one row each, exactly what the model takes, or not known before reading."""


@dataclass(frozen=True)
class Record:
    """One item as it was stored.

    Attributes:
        name: file, and index in it, for messages.
        raw: model input → raw value (array, `Picture`, path, text). The key "" stands for "whatever the preprocessing
            makes of it", where the model has several inputs.
        label, context: as in `Sample`.
    """

    name: str
    raw: Mapping[str, Any]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


class Hash(Protocol):
    """The part of hashlib's objects that digests use."""

    def update(self, data: bytes, /) -> None:
        """Add `data` to what is hashed."""


class Source(Protocol):
    """Records with random access by rising index.

    Attributes:
        rows: how records fill the batch axis.
        prepared: whether the records are model inputs already.
        notes: how the data was read, where that was a choice; a sentence each.
    """

    @property
    def rows(self) -> Rows: ...
    @property
    def prepared(self) -> bool: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def read(self, indices: range) -> Iterator[Record]:
        """The records of `indices` (rising), each loaded when the iterator reaches it."""

    def update(self, digest: Hash, indices: range) -> None:
        """Feed the contents behind `indices` to `digest`."""


@dataclass(frozen=True)
class FileList(ABC):
    """Files, one record each.

    Attributes:
        root: the folder that names are relative to.
        files: in the order of reading.
        target: the model input they feed ("" where the preprocessing decides).
        classes: class sub-folder → label, or empty.
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
        """The raw value of one file."""

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: range) -> Iterator[Record]:
        """The files of `indices`, one at a time; the context has the file, its class folder and its path."""
        for path in (self.files[index] for index in indices):
            context, label = place(path, self.root, self.classes)
            yield Record(str(path), {self.target: self.item(path)}, label, context)

    def update(self, digest: Hash, indices: range) -> None:
        """Hash path below the folder and bytes of each file."""
        for path in (self.files[index] for index in indices):
            update_with_file(digest, path, path.relative_to(self.root).as_posix())


def check_size(size: int, what: str, fix: str, *, held: int = 0) -> None:
    """Refuse what would take more bytes than one sample may, before they are allocated.

    Args:
        what: begins the message.
        held: bytes of the file behind it, which it may take in any case.

    Raises:
        DataError: it would.
    """
    most = largest_sample()
    if size > most + held:
        raise DataError(f"{what}: {size} bytes, where a sample may take {most}", f"{fix}; {VARIABLE} sets the limit")


def read_text(path: Path, fix: str = "Split it") -> str:
    """A UTF-8 file of bounded size and number of lines and cells.

    Raises:
        DataError: it is larger, with the advice `fix`, or cannot be read.
    """
    try:
        if is_longer(path, MAX_TEXT_BYTES):
            raise DataError(f"{path} is larger than {MAX_TEXT_BYTES} bytes", fix)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text", "It is damaged or of another kind") from error
    if sum(map(text.count, _SEPARATORS)) > MAX_CELLS:
        raise DataError(f"{path} has more than {MAX_CELLS} lines and cells", fix)
    return text


def spans(counts: Sequence[int], indices: range) -> Iterator[tuple[int, range, range]]:
    """Split rising global `indices` over files that hold `counts` records.

    Yields:
        (file number, indices inside the file, the same as global indices), only for files that are touched.
    """
    start = 0
    for number, count in enumerate(counts):
        first = max(0, -(-(start - indices.start) // indices.step))
        last = max(0, -(-(start + count - indices.start) // indices.step))
        chosen = indices[first:last]
        if len(chosen):
            yield number, range(chosen.start - start, chosen.stop - start, chosen.step), chosen
        start += count


def update_with_file(digest: Hash, path: Path, name: str) -> None:
    """Feed a file's name, size and bytes to `digest`."""
    try:
        # Names that are not UTF-8 hold lone surrogates.
        digest.update(f"{name}\0{path.stat().st_size}\0".encode("utf-8", "surrogatepass"))
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
