"""Read flatbuffers from untrusted bytes.

Every offset and length is checked against the buffer. A budget limits how many bytes are read in all, because many
offsets may point to one large table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A well-formed file is read about once: names and shapes a few times.
_READS = 4


class BrokenFlatError(Exception):
    """Report bytes that are not the expected flatbuffer. The message states only the problem."""


class FlatBuffer:
    """Hold the bytes of a flatbuffer, and count what is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._budget = _READS * len(data) + 1024

    def number(self, code: str, place: int) -> Any:
        """Return the number with the `struct` code `code` at a place."""
        size = struct.calcsize(code)
        return struct.unpack_from(f"<{code}", self.span(place, size))[0]

    def span(self, place: int, size: int) -> memoryview:
        """Return `size` bytes from a place.

        Raises:
            BrokenFlatError: they are not inside the buffer, or too much was read already.
        """
        if place < 0 or size < 0 or place + size > len(self.data):
            raise BrokenFlatError(f"an offset or length leads out of the file ({place} + {size} bytes)")
        self._budget -= max(size, 4)
        if self._budget < 0:
            raise BrokenFlatError("its tables refer to the same bytes too often")
        return memoryview(self.data)[place : place + size]

    def root(self) -> FlatTable:
        """Return the root table."""
        return FlatTable(self, self.number("I", 0))


class FlatTable:
    """Read the fields of one table. A field that is absent has its default."""

    def __init__(self, buffer: FlatBuffer, place: int) -> None:
        self._buffer, self._place = buffer, place
        self._fields = place - buffer.number("i", place)
        self._count = (buffer.number("H", self._fields) - 4) // 2

    def _at(self, field: int) -> int | None:
        if field >= self._count:
            return None
        offset = self._buffer.number("H", self._fields + 4 + 2 * field)
        return self._place + offset if offset else None

    def _target(self, field: int) -> int | None:
        place = self._at(field)
        return None if place is None else place + self._buffer.number("I", place)

    def has(self, field: int) -> bool:
        """Return whether the field is present."""
        return self._at(field) is not None

    def number(self, field: int, code: str, default: int = 0) -> Any:
        """Return a number, or a struct of one number."""
        place = self._at(field)
        return default if place is None else self._buffer.number(code, place)

    def table(self, field: int) -> FlatTable:
        """Return the table that a field refers to.

        Raises:
            BrokenFlatError: it is absent.
        """
        place = self._target(field)
        if place is None:
            raise BrokenFlatError("a table is missing")
        return FlatTable(self._buffer, place)

    def tables(self, field: int) -> Iterator[FlatTable]:
        """Yield the tables of a vector."""
        for place in self._places(field):
            yield FlatTable(self._buffer, place)

    def text(self, field: int) -> str:
        """Return a text; "" if it is absent."""
        place = self._target(field)
        return "" if place is None else self._text_at(place)

    def texts(self, field: int) -> tuple[str, ...]:
        """Return the texts of a vector."""
        return tuple(self._text_at(place) for place in self._places(field))

    def array(self, field: int, dtype: str, size: int = 1) -> NDArray[Any]:
        """Return a vector of numbers, or of structs of `size` numbers, as one dimension."""
        place = self._target(field)
        kind = np.dtype(dtype).newbyteorder("<")
        if place is None:
            return np.empty(0, kind)
        count = self._buffer.number("I", place) * size
        return np.frombuffer(self._buffer.span(place + 4, count * kind.itemsize), kind)

    def _text_at(self, place: int) -> str:
        length = self._buffer.number("I", place)
        try:
            return bytes(self._buffer.span(place + 4, length)).decode()
        except UnicodeDecodeError:
            raise BrokenFlatError("a text is not UTF-8") from None

    def _places(self, field: int) -> Iterator[int]:
        place = self._target(field)
        if place is None:
            return
        count = self._buffer.number("I", place)
        self._buffer.span(place + 4, 4 * count)
        for entry in range(place + 4, place + 4 + 4 * count, 4):
            yield entry + self._buffer.number("I", entry)
