"""Change one field of a protobuf message. A change removes, repeats, exchanges or moves the field, or sets it to an
extreme value.

The field is chosen at random from all the fields of the message's type and of nested messages. Absent fields are as
likely as other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from fuzz.mutate import ESCAPES, Mutation

_LARGEST = 65536
_NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 63, 2**31 - 1, 2**63 - 1)
_REALS = (0.0, -1.0, 1e38, float("nan"), float("inf"))
_TEXTS = ("", "\0", "\n", "../x", "x" * 5000, "ai.onnx", "com.microsoft", *ESCAPES)
_BITS = {
    FieldDescriptor.TYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.TYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.TYPE_UINT64: range(2**64),
}


def of_fields(kind: type[Message]) -> Mutation:
    """Return a mutation that makes one change, or sometimes two, to a message of this type."""

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        message = kind()
        message.ParseFromString(data)
        for _ in range(random.choice((1, 1, 1, 2))):
            random.choice(_changes(random, message))()
        return message.SerializePartialToString()

    return mutate


def _changes(random: Random, whole: Message) -> list[Callable[[], object]]:
    """Return the possible changes to one field of one message."""
    messages = list(_nested(whole))
    message = random.choice(messages)
    field = random.choice(message.DESCRIPTOR.fields)
    like = [m for m in messages if field.message_type == m.DESCRIPTOR]
    texts = _texts(messages)
    if field.is_repeated:
        return list(_of_list(getattr(message, field.name), field, like, texts))
    return list(_of_one(message, field, like, texts))


def _of_list(
    held: Any, field: FieldDescriptor, like: Sequence[Message], texts: Sequence[str]
) -> Iterator[Callable[[], object]]:
    for place in sorted({0, len(held) - 1}) if held else ():
        yield lambda place=place: held.__delitem__(place)
        yield lambda place=place: held.append(held[place])
    if len(held) > 1:
        yield lambda: held.append(held.pop(0))
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        yield lambda: held.add()
        for other in _small(like):
            yield lambda other=other: held.append(other)
        return
    for value in _values(field, texts):
        yield lambda value=value: held.append(value)
        if held:
            yield lambda value=value: held.__setitem__(0, value)


def _of_one(
    message: Message, field: FieldDescriptor, like: Sequence[Message], texts: Sequence[str]
) -> Iterator[Callable[[], object]]:
    if message.HasField(field.name):
        yield lambda: message.ClearField(field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        held = getattr(message, field.name)
        yield held.Clear if message.HasField(field.name) else held.SetInParent
        for other in _small(like):
            yield lambda other=other: held.CopyFrom(other)
        return
    for value in _values(field, texts):
        yield lambda value=value: setattr(message, field.name, value)


def _nested(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _nested(inner)


def _small(messages: Sequence[Message]) -> list[Message]:
    """Return copies of the first and the last messages. Copies are needed because a message may contain the place into
    which it is inserted.
    """
    few = [m for m in (*messages[:2], *messages[-1:]) if m.ByteSize() < _LARGEST]
    return [type(m).FromString(m.SerializePartialToString()) for m in few]


def _texts(messages: Sequence[Message]) -> list[str]:
    """Return names from all parts of the message, and texts that are not in the message."""
    named = [m.name for m in messages if "name" in m.DESCRIPTOR.fields_by_name and m.name]
    return [*_TEXTS, *list(dict.fromkeys(named))[:: max(1, len(set(named)) // 8)]]


def _values(field: FieldDescriptor, texts: Sequence[str]) -> Sequence[Any]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return texts
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\0", b"\xff" * 8)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return _REALS
    if field.type == FieldDescriptor.TYPE_ENUM:
        return [value.number for value in field.enum_type.values]
    return [number for number in _NUMBERS if number in _BITS[field.type]]
