"""Define what every reader gives: records in a fixed order, read lazily, within bounds."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from edgeq_device.budget import VARIABLE, largest_sample
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.signature import TensorSpec
from edgeq.util.display import Displayed
from edgeq.util.records import is_longer


def place(path: Path, root: Path, classes: Mapping[str, int]) -> tuple[dict[str, Any], int | None]:
    """Return the context that a file's place gives its samples (its name, its path below `root`, its class folder), and
    the label of that folder; without `classes` neither."""
    below = path.relative_to(root)
    context = {"file": path.name, "path": below.as_posix()}
    if not classes:
        return context, None
    return {**context, "class": below.parts[0]}, classes[below.parts[0]]


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
    """Hold one item as it was stored.

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
    """Describe the part of hashlib's objects that digests use."""

    def update(self, data: bytes, /) -> None:
        """Add `data` to what is hashed."""


class Source(Protocol):
    """Read records with random access by rising index.

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
    def read(self, indices: Sequence[int]) -> Iterator[Record]:
        """Return the records of `indices` (rising), each loaded when the iterator reaches it."""

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Feed the contents behind `indices` to `digest`."""


@dataclass(frozen=True)
class FileList(ABC):
    """Read files, one record each.

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
        """Return the raw value of one file."""

    def __len__(self) -> int:
        return len(self.files)

    def groups(self) -> Sequence[str]:
        """Return the class folder of each file, or nothing."""
        return [path.relative_to(self.root).parts[0] for path in self.files] if self.classes else ()

    def read(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the files of `indices`, one at a time; the context has the file, its class folder and its path."""
        for path in (self.files[index] for index in indices):
            context, label = place(path, self.root, self.classes)
            yield Record(str(path), {self.target: self.item(path)}, label, context)

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
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
    """Return a UTF-8 file of bounded size and number of lines and cells.

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


def spans(counts: Sequence[int], indices: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Split rising global `indices` over files that hold `counts` records.

    Yields:
        (file number, indices inside the file), only for files that are touched; a range of a range.
    """
    start = first = 0
    for number, count in enumerate(counts):
        last = bisect_left(indices, start + count, first)
        chosen = indices[first:last]
        if isinstance(chosen, range):
            chosen = range(chosen.start - start, chosen.stop - start, chosen.step)
        else:
            chosen = [index - start for index in chosen]
        if len(chosen):
            yield number, chosen
        start, first = start + count, last


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


Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """Hold a decoded image. `pixels`: uint8 [H, W, 3], red first."""

    pixels: Array


@dataclass(frozen=True)
class Geometry:
    """Map the pixels of the original image to those of the model's input.

    For a point, x_input = x_original * scale[0] + offset[0], and the same for y with index 1.

    Attributes:
        original: (width, height) of the image as stored.
        scale: (horizontal, vertical), as the resize rule computes it in float64 (before sizes are rounded to pixels).
        offset: (horizontal, vertical) in input pixels: positive where padding was added, negative where a crop cut.
    """

    original: tuple[int, int]
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)

    def scaled(self, x: float, y: float) -> Geometry:
        """Return the geometry after the image was scaled by `x` and `y`."""
        return Geometry(
            self.original,
            (self.scale[0] * x, self.scale[1] * y),
            (self.offset[0] * x, self.offset[1] * y),
        )

    def moved(self, x: float, y: float) -> Geometry:
        """Return the geometry after the image was moved by `x` and `y` pixels of the input."""
        return Geometry(self.original, self.scale, (self.offset[0] + x, self.offset[1] + y))

    def context(self) -> dict[str, Any]:
        """Return the keys that a sample's context carries."""
        return {"original_size": self.original, "scale": self.scale, "offset": self.offset}


def to_original(boxes: Array, context: Mapping[str, Any]) -> Array:
    """Map boxes from input pixels back to pixels of the original image.

    Args:
        boxes: [..., 4] as x1, y1, x2, y2 (floating).
        context: a sample's context with "scale" and "offset" (see `Geometry`).
    """
    scale = np.asarray(context["scale"] * 2, boxes.dtype)
    offset = np.asarray(context["offset"] * 2, boxes.dtype)
    return np.asarray((boxes - offset) / scale)


@dataclass(frozen=True)
class State:
    """Hold one item on its way to the model.

    Attributes:
        array: the values.
        axes: one letter an axis (N batch, C channel, H row, W column, others as the source declares), or "" where the
            axes have no declared meaning.
        channels: the order of the channels, "RGB" or "BGR", or "" for anything else.
        geometry: for images.
    """

    array: Array
    axes: str
    channels: str = ""
    geometry: Geometry | None = None


def model_axes(spec: TensorSpec | None, axes: str) -> str:
    """Return the axes of a model input, read from its shape: channels are where the size is 1 or 3, else first.

    Args:
        spec: the input.
        axes: the item's axes, without the batch; they decide where the shape alone says nothing.
    """
    if spec is None or spec.shape is None:
        return ""
    shape = spec.shape
    if len(shape) == 4:
        return "NHWC" if shape[3] in (1, 3) and shape[1] not in (1, 3) else "NCHW"
    if len(shape) == 3 and "C" in axes:
        return "HWC" if shape[2] in (1, 3) and shape[0] not in (1, 3) else "CHW"
    if len(shape) == len(axes) + 1:
        return "N" + axes
    return axes if len(shape) == len(axes) else ""


def assumed_axes(shape: tuple[int, ...], spec: TensorSpec | None) -> str:
    """Return the axes of a raw array without declared ones: those of the model where the shape is the model's own (with
    or without its batch axis); else HWC for three axes, HW for two, and no meaning for any other number."""
    guess = {2: "HW", 3: "HWC"}.get(len(shape), "")
    if spec is None or spec.shape is None:
        return guess
    own = model_axes(spec, "HWC" if len(spec.shape) >= 3 else "")
    for wanted, axes in ((spec.shape, own.replace("N", "")), (spec.shape[1:], own[1:] if own[:1] == "N" else "")):
        same = len(wanted) == len(shape) and all(
            not isinstance(want, int) or want == have for want, have in zip(wanted, shape, strict=True)
        )
        if same and any(isinstance(want, int) for want in wanted):
            return axes
    return guess


def model_size(spec: TensorSpec | None) -> tuple[int, int] | None:
    """Return the (width, height) that a model's image input fixes, or None."""
    axes = model_axes(spec, "HWC")
    if spec is None or spec.shape is None or "H" not in axes or len(axes) != len(spec.shape):
        return None
    height, width = spec.shape[axes.index("H")], spec.shape[axes.index("W")]
    if isinstance(height, int) and isinstance(width, int):
        return width, height
    return None


@dataclass(frozen=True)
class Sample(Displayed):
    """Hold one run's worth of input.

    Attributes:
        name: file (and index in it), for messages.
        inputs: exactly what `session.run` takes, batch dimension included.
        label: class index or whatever the reader found; None where there is none. In a batch that was gathered for a
            model of fixed batch size, the tuple of its rows' labels.
        context: "file" (base name), "path" (below the data folder), "index" (in its file), "class" (sub-folder), and
            for images "original_size" (width, height), "scale", "offset" (see `edgeq.data.records.Geometry`). In a
            gathered batch: "rows" (the rows' contexts) and "valid" (how many rows are not filling).
    """

    name: str
    inputs: Mapping[str, Array]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


def plain_label(value: Any) -> Any:
    """Return text that is a number as that number, numpy scalars as Python's, and anything else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[+-]?\d{1,18}", text):
            return int(text)
        if re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d{1,3})?", text):
            return float(text)
        return text
    return value


@dataclass(frozen=True)
class SourceOptions:
    """Say where in the data the raw items and labels are.

    Attributes:
        key: the array that holds the items (.npz).
        encoded, offsets: the array that holds concatenated image files (JPEG, PNG …), and the one whose n + 1 numbers
            say where each begins (.npz).
        label: the array that holds the labels (.npz), or the column (text).
        labels: where labels come from otherwise; see `edgeq.data.labels`.
        layout: the axes of one raw item, such as "HWC", "CHW", "TF". Leading axes beyond these count samples.
        channels: the order of the colour channels in raw arrays.
        input: the model input that the items feed, where the model has several.
        stack: for prepared arrays, whether the leading axis counts samples; None decides by the model's shape.
        pattern: which files of a folder to read, by their names (as "*.wav").
    """

    key: str | None = None
    encoded: str | None = None
    offsets: str | None = None
    label: str | None = None
    labels: str | None = None
    layout: str | None = None
    channels: str = "RGB"
    input: str | None = None
    stack: bool | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            right = isinstance(value, bool) if item.name == "stack" else isinstance(value, str)
            if value is not None and not right:
                raise DataError(f"source.{item.name} is {value!r}", "Give a string (true or false for source.stack)")
        if self.layout is not None and not (self.layout.isalpha() and len(set(self.layout)) == len(self.layout)):
            raise DataError(f"source.layout is {self.layout!r}", "Give one letter an axis, such as 'HWC'")
        if self.layout is not None and "N" in self.layout:
            raise DataError(f"source.layout is {self.layout!r}", "Name the axes of one item, without the batch axis N")
        if (self.encoded is None) != (self.offsets is None):
            raise DataError("source.encoded and source.offsets go together", "Name both arrays")
        if self.channels not in ("RGB", "BGR"):
            raise DataError(f"source.channels is {self.channels!r}", "Use 'RGB' or 'BGR'")

    def __record__(self) -> dict[str, Any]:
        """Return only what differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
