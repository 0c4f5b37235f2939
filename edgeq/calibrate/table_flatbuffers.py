"""The bytes of a TrtTable flatbuffer: written with the flatbuffers package, read with bounds checked.

Schema (namespace CalTableFlatBuffers): table KeyValue {key: string (required, key); value: string}; table TrtTable
{dict: [KeyValue]}; root type TrtTable.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import flatbuffers

DICT, KEY, VALUE = 0, 0, 1
"""Slots. A table's fields are numbered in the order of the schema."""
LONGEST_VALUE = 256
"""Bytes of a number's decimal text."""


def encode_table(table: Mapping[str, str]) -> bytes:
    """A TrtTable of name → decimal text; keys ascending by their bytes, as flatbuffers compares them."""
    builder = flatbuffers.Builder(1024)
    pairs = []
    for name, value in sorted(table.items(), key=lambda pair: pair[0].encode()):
        key, text = builder.CreateString(name), builder.CreateString(value)
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(KEY, key, 0)
        builder.PrependUOffsetTRelativeSlot(VALUE, text, 0)
        pairs.append(builder.EndObject())
    builder.StartVector(4, len(pairs), 4)
    for pair in reversed(pairs):
        builder.PrependUOffsetTRelative(pair)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(DICT, vector, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def decode_table(content: bytes) -> list[tuple[str, str]]:
    """The pairs of a TrtTable, in their order.

    Raises:
        ValueError, IndexError, struct.error, UnicodeDecodeError: the bytes are no such table.
    """
    view = _View(content)
    vector = view.field(view.follow(0), DICT)
    if vector is None:
        return []
    count = view.unsigned(vector)
    if count > len(content) // 4:
        raise ValueError("its vector is longer than the file")
    pairs = []
    # Names differ, so that each has bytes of its own in an honest file; else a megabyte of offsets to one long name
    # would become gigabytes of text.
    left = len(content)
    for index in range(count):
        pair = view.follow(vector + 4 + 4 * index)
        key, value = view.field(pair, KEY), view.field(pair, VALUE)
        if key is None or value is None:
            raise ValueError("an entry lacks its key or value")
        name, text = view.string(key, left), view.string(value, LONGEST_VALUE)
        left -= len(name)
        pairs.append((name, text))
    return pairs


class _View:
    """Offsets of a flatbuffer, none of which may leave the buffer."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def unsigned(self, at: int) -> int:
        """The little-endian uint32 at byte `at`."""
        return int(struct.unpack_from("<I", self._content, self._inside(at, 4))[0])

    def follow(self, at: int) -> int:
        """Where the offset at byte `at` leads to, counted from there."""
        return self._inside(at + self.unsigned(at), 4)

    def field(self, table: int, slot: int) -> int | None:
        """Where the offset field `slot` of the table at `table` points; None where it is absent."""
        (back,) = struct.unpack_from("<i", self._content, self._inside(table, 4))
        vtable = self._inside(table - back, 4)
        (size,) = struct.unpack_from("<H", self._content, vtable)
        place = 4 + 2 * slot
        if place + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self._content, self._inside(vtable + place, 2))
        return self.follow(table + offset) if offset else None

    def string(self, at: int, most: int) -> str:
        """The text at byte `at`, of at most `most` bytes: its length in bytes as uint32, then UTF-8."""
        length = self.unsigned(at)
        if length > most:
            raise ValueError(f"a text has {length} bytes, more than there can be")
        self._inside(at + 4, length)
        return self._content[at + 4 : at + 4 + length].decode()

    def _inside(self, at: int, size: int) -> int:
        if at < 0 or at + size > len(self._content):
            raise ValueError("an offset leaves the file")
        return at
