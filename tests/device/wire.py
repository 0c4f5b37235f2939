"""Protobuf's wire format by hand, for files that no library would write."""

from __future__ import annotations


def number(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(field_number: int, content: bytes) -> bytes:
    """A field of bytes: a string or a message."""
    return number(field_number << 3 | 2) + number(len(content)) + content


def tensor(*fields: bytes) -> bytes:
    """The graph of one initializer made of these fields."""
    return field(5, b"".join(fields))


def whole(graph: bytes) -> bytes:
    """A model of this graph."""
    return field(7, graph)
