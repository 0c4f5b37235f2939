"""Define the records that every reader returns. Records have a fixed order, and are read lazily and within memory
limits.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from edgeq_device.system.budget import VARIABLE, largest_sample
from edgeq_device.system.files import open_file, read_file
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.signature import TensorSpec
from edgeq.util.display import Displayed
from edgeq.util.record_files import is_longer


def place(path: Path, root: Path, classes: Mapping[str, int]) -> tuple[dict[str, Any], int | None]:
    """Return the context of a file's samples (file name, path below `root`, class folder), and the label of the class
    folder. Without `classes`, the context has no class folder and the label is None.
    """
    below = path.relative_to(root)
    context = {"file": path.name, "path": below.as_posix()}
    if not classes:
        return context, None
    return {**context, "class": below.parts[0]}, classes[below.parts[0]]


MAX_PIXELS = 1 << 26
"""Largest number of pixels of one image (64 M). Larger images may be decompression bombs."""

MAX_TEXT_BYTES = 1 << 26
"""Largest size in bytes of a file of labels or text lines."""

MAX_CELLS = 1 << 23
"""Largest number of lines and cells in a file of labels or text lines. Each line or cell becomes a Python object,
however short it is.
"""

_SEPARATORS = ",\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

MAX_FILES = 10_000_000

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
    def read(self, indices: Sequence[int]) -> Iterator[Record]:
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
        return [path.relative_to(self.root).parts[0] for path in self.files] if self.classes else ()

    def read(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the files at `indices`, one at a time. A record's context contains the file name, the class folder and
        the path.
        """
        for path in (self.files[index] for index in indices):
            context, label = place(path, self.root, self.classes)
            yield Record(str(path), {self.target: self.item(path)}, label, context)

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Hash each file's bytes and its path below the folder."""
        for path in (self.files[index] for index in indices):
            update_with_file(digest, path, path.relative_to(self.root).as_posix())


def check_size(size: int, what: str, fix: str, *, held: int = 0) -> None:
    """Refuse an allocation of more bytes than one sample may take.

    Args:
        what: the beginning of the error message.
        held: size in bytes of the file that contains the sample. This many additional bytes are always allowed.

    Raises:
        DataError: `size` is larger than the limit.
    """
    most = largest_sample()
    if size > most + held:
        raise DataError(
            f"{what}: {size} bytes, but a sample may take at most {most}", f"{fix}; {VARIABLE} sets the limit"
        )


def read_text(path: Path, fix: str = "Split it") -> str:
    """Return the text of a UTF-8 file. The file's size and its number of lines and cells are limited.

    Raises:
        DataError: the file is too large (the advice is then `fix`) or cannot be read.
    """
    try:
        if is_longer(path, MAX_TEXT_BYTES):
            raise DataError(f"{path} is larger than {MAX_TEXT_BYTES} bytes", fix)
        text = read_file(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
    except ValueError as error:
        raise DataError(f"{path} is not UTF-8 text", "It is damaged or of another kind") from error
    if sum(map(text.count, _SEPARATORS)) > MAX_CELLS:
        raise DataError(f"{path} has more than {MAX_CELLS} lines and cells", fix)
    return text


def spans(counts: Sequence[int], indices: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Split ascending global `indices` over files that have `counts` records.

    Yields:
        (file number, indices in that file) for each file that contains any of the indices. If `indices` is a range, the
            results are ranges.
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
        # Names that are not UTF-8 contain lone surrogates.
        digest.update(f"{name}\0{path.stat().st_size}\0".encode("utf-8", "surrogatepass"))
        with open_file(path) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error


Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """Hold a decoded image. `pixels` is uint8 [H, W, 3], red first."""

    pixels: Array


@dataclass(frozen=True)
class ImageGeometry:
    """Map the pixels of the original image to the pixels of the model's input.

    For a point, x_input = x_original * scale[0] + offset[0] and y_input = y_original * scale[1] + offset[1].

    Attributes:
        original: (width, height) of the image as stored.
        scale: (horizontal, vertical), as the resize rule computes it in float64 (before sizes are rounded to pixels).
        offset: (horizontal, vertical) in input pixels: positive if padding was added, negative if a crop cut pixels
            off.
    """

    original: tuple[int, int]
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)

    def scaled(self, x: float, y: float) -> ImageGeometry:
        """Return the geometry after the image was scaled by `x` and `y`."""
        return ImageGeometry(
            self.original,
            (self.scale[0] * x, self.scale[1] * y),
            (self.offset[0] * x, self.offset[1] * y),
        )

    def moved(self, x: float, y: float) -> ImageGeometry:
        """Return the geometry after the image was moved by `x` and `y` pixels of the input."""
        return ImageGeometry(self.original, self.scale, (self.offset[0] + x, self.offset[1] + y))

    def context(self) -> dict[str, Any]:
        """Return the keys and values that the geometry adds to a sample's context."""
        return {"original_size": self.original, "scale": self.scale, "offset": self.offset}


def to_original(boxes: Array, context: Mapping[str, Any]) -> Array:
    """Map boxes from input pixels back to pixels of the original image.

    Args:
        boxes: [..., 4] as x1, y1, x2, y2, in floating point.
        context: a sample's context with "scale" and "offset" (see `ImageGeometry`).
    """
    scale = np.asarray(context["scale"] * 2, boxes.dtype)
    offset = np.asarray(context["offset"] * 2, boxes.dtype)
    return np.asarray((boxes - offset) / scale)


@dataclass(frozen=True)
class ItemState:
    """Hold one item between two preprocessing steps.

    Attributes:
        array: the values.
        axes: one letter per axis (N batch, C channel, H row, W column, others as the source declares), or "" if the
            axes have no declared meaning.
        channels: the order of the channels, "RGB" or "BGR", or "" for anything else.
        geometry: the geometry of an image, or None for other items.
    """

    array: Array
    axes: str
    channels: str = ""
    geometry: ImageGeometry | None = None


def model_axes(spec: TensorSpec | None, axes: str) -> str:
    """Return the axes of a model input, derived from its shape. The channel axis is the one whose size is 1 or 3, or
    else the first.

    Args:
        spec: the input.
        axes: the item's axes without the batch axis. They settle the order if the shape alone is ambiguous.
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
    """Return the axes of a raw array that has no declared axes.

    If the shape matches the model's input (with or without its batch axis), these are the input's axes. Otherwise three
    axes are HWC and two axes are HW. For any other number of axes, the result is "".
    """
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
    """Return the (width, height) that a model's image input fixes, or None if the input fixes no size."""
    axes = model_axes(spec, "HWC")
    if spec is None or spec.shape is None or "H" not in axes or len(axes) != len(spec.shape):
        return None
    height, width = spec.shape[axes.index("H")], spec.shape[axes.index("W")]
    if isinstance(height, int) and isinstance(width, int):
        return width, height
    return None


@dataclass(frozen=True)
class Sample(Displayed):
    """Hold the inputs of one run of the model.

    Attributes:
        name: the file name and the index in the file, for messages.
        inputs: the arrays for `session.run`, batch dimension included.
        label: class index or any other label that the reader found, or None. For a batch that was gathered for a model
            with a fixed batch size, this is the tuple of its rows' labels.
        context: "file" (base name), "path" (below the data folder), "index" (in the file) and "class" (sub-folder). For
            images, also "original_size" (width, height), "scale" and "offset" (see `edgeq.data.records.ImageGeometry`).
            For a gathered batch, "rows" (the rows' contexts) and "valid" (the number of rows that are not padding).
    """

    name: str
    inputs: Mapping[str, Array]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


def plain_label(value: Any) -> Any:
    """Return text that contains a number as that number, and a numpy scalar as a Python scalar. Return any other value
    unchanged.
    """
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
    """Locate the raw items and labels in the data.

    Attributes:
        key: the array that contains the items (.npz).
        encoded, offsets: the array that contains concatenated image files (JPEG, PNG …), and the array of their n + 1
            positions (.npz). The positions are the beginnings of the n files and the end of the last file.
        label: the array that contains the labels (.npz), or the column that contains them (text).
        labels: another source of the labels; see `edgeq.data.labels`.
        layout: the axes of one raw item, such as "HWC", "CHW", "TF". Additional leading axes count samples.
        channels: the order of the colour channels in raw arrays.
        input: the model input that the items feed, if the model has several.
        stack: whether the leading axis of prepared arrays counts samples. If this is None, the model's shape decides.
        pattern: pattern of the file names to read in a folder, such as "*.wav".
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
            raise DataError(f"source.layout is {self.layout!r}", "Give one letter per axis, such as 'HWC'")
        if self.layout is not None and "N" in self.layout:
            raise DataError(f"source.layout is {self.layout!r}", "Name the axes of one item, without the batch axis N")
        if (self.encoded is None) != (self.offsets is None):
            raise DataError("source.encoded and source.offsets go together", "Name both arrays")
        if self.channels not in ("RGB", "BGR"):
            raise DataError(f"source.channels is {self.channels!r}", "Use 'RGB' or 'BGR'")

    def __record__(self) -> dict[str, Any]:
        """Return only the options that differ from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
