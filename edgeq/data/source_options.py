"""Define the options that locate raw items and labels in the data: the [source] table of a preprocessing."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from edgeq.errors import DataError


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
        # TOML and one line of text give values of any type, so the types are checked here once for both.
        for item in fields(self):
            value = getattr(self, item.name)
            right = isinstance(value, bool) if item.name == "stack" else isinstance(value, str)
            if value is not None and not right:
                raise DataError(f"source.{item.name} is {value!r}", "Give a string (true or false for source.stack)")
        # A letter that occurs twice would make the position of that axis ambiguous.
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
        # Defaults are left out, so that records of earlier versions stay equal when an option is added.
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
