"""Write protobuf's wire format by hand, for files that no library would write."""

from __future__ import annotations


def number(value: int) -> bytes:
    """Encode a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(field_number: int, content: bytes) -> bytes:
    """Encode a field of bytes, which may be a string or a message."""
    return number(field_number << 3 | 2) + number(len(content)) + content


def tensor(*fields: bytes) -> bytes:
    """Encode the graph of one initializer with these fields."""
    return field(5, b"".join(fields))


def whole(graph: bytes) -> bytes:
    """Encode a model of this graph."""
    return field(7, graph)
