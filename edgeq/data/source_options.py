"""Where in the data the raw items and labels are: the [source] table of a preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgeq.errors import DataError


@dataclass(frozen=True)
class SourceOptions:
    """Where in the data the raw items and labels are.

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
        """Only what differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


def parse_source(value: Mapping[str, Any]) -> SourceOptions:
    """Source options of a [source] table.

    Raises:
        DataError: an unknown field, or a value that it does not take.
    """
    names = {f.name for f in fields(SourceOptions)}
    for key in value:
        if key not in names:
            raise DataError(f"unknown field source.{key}", f"The fields are {', '.join(sorted(names))}")
    return SourceOptions(**value)
