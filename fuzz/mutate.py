"""Mutate the bytes of real files, and the structure of JSON, TOML, zip and protobuf files."""

from __future__ import annotations

import copy
import functools
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]
"""Function that takes a random generator, a file and all the files of the layer, and returns a changed file."""

MOST_BYTES = 1 << 20
SIZES = (-1, 0, 1, 2, 7, 127, 128, 255, 256, 65535, 65536, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1)
NUMBERS = (*SIZES, -(2**31), -(2**63), 2**64 - 1, 2**64, 10**30)
SPOOF = "all variants passed"
ESCAPES = ("\x1b]0;title\x07", "\x1b[2J", "\x9b2J", "\u202e", f"\n{SPOOF}\n", "\r")
"""Texts that control a terminal or look like a line that edgeq prints."""
TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "\x1b[31m",
    "\ud800",
    "../x",
    "/etc/passwd",
    "a/" * 300,
    "CON",
    "x" * 5000,
    "9" * 5000,
    "NaN",
    "1e999",
    "{label}*" * 20,
    "[" * 2000,
    "sha256:" + "0" * 64,
    "model:0:1:2",
    *ESCAPES,
)


def of_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Make one to four small changes anywhere."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        _change(random, changed, others)
        del changed[MOST_BYTES:]
    return bytes(changed)


def _change(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = random.randrange(len(data) + 1)
    size = random.choice((1, 1, 2, 4, 8, 16, 64, 256))
    kind = random.randrange(10)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << random.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    elif kind == 2:
        width = random.choice((2, 4, 8))
        number = random.choice(SIZES) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
    elif kind == 3:
        del data[at : at + size]
    elif kind == 4:
        data[at:at] = data[at : at + size] * random.choice((1, 2, 100))
    elif kind == 5:
        data[at:at] = random.randbytes(size)
    elif kind == 6:
        other = random.choice(others)
        start = random.randrange(len(other) + 1)
        data[at : at + size] = other[start : start + size]
    elif kind == 7:
        del data[at:]
    elif kind == 8:
        found = list(re.finditer(rb"\d+", data[:65536]))
        if found:
            match = random.choice(found)
            data[match.start() : match.end()] = str(random.choice((*NUMBERS, "9" * 4400))).encode()
    else:
        data[at:at] = random.choice(TEXTS).encode("utf-8", "surrogatepass")


def of_json(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Replace, remove, move or nest values, or sometimes change bytes."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(random, data, others)
    for _ in range(random.randint(1, 3)):
        value = _replaced(random, value)
    text = json.dumps(value).encode()
    return of_bytes(random, text, others) if random.random() < 0.2 else text


def _replaced(random: Random, value: Any) -> Any:
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    if isinstance(value, dict | list):
        walk(value)
    if not places or random.random() < 0.02:
        return _odd(random)
    node, key = random.choice(places)
    kind = random.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, place = random.choice(places)
        node[key] = copy.deepcopy(other[place]) if _has(other, place) else None
    elif kind == 2 and isinstance(node, dict):
        node[random.choice(TEXTS)] = node.pop(key)
    else:
        node[key] = _odd(random)
    return value


def _has(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)


def _odd(random: Random) -> Any:
    nested: Any = []
    for _ in range(random.choice((3, 60))):
        nested = [nested]
    pool: tuple[Any, ...] = (None, True, False, [], {}, nested, 1.5, -0.0, 1e308, float("nan"), [{}], {"": None})
    return random.choice((random.choice(pool), random.choice(NUMBERS), random.choice(TEXTS)))


def of_text(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Remove, repeat or mix lines, replace values, or change bytes."""
    lines = data.split(b"\n")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(lines))
        kind = random.randrange(5)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines[at:at] = lines[at : at + 3] * random.choice((1, 1, 50))
        elif kind == 2:
            lines[at] = random.choice(random.choice(others).split(b"\n"))
        else:
            odd = json.dumps(_odd(random)).encode()
            lines[at] = re.sub(rb"=.*", lambda _, odd=odd: b"= " + odd, lines[at])
        lines = lines or [b""]
    text = b"\n".join(lines)[:MOST_BYTES]
    return of_bytes(random, text, others) if random.random() < 0.4 else text


def of_zip(inner: Mutation) -> Mutation:
    """Return a mutation that changes an archive's bytes or its members. To change a member's content, it uses
    `inner`.
    """

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        except (zipfile.BadZipFile, ValueError):
            members = []
        if not members or random.random() < 0.35:
            return of_bytes(random, data, others)
        at = random.randrange(len(members))
        name, content = members[at]
        kind = random.randrange(8)
        if kind == 0:
            members[at] = (random.choice((*TEXTS[5:9], "x.npy", name.upper())), content)
        elif kind == 1:
            members.append((name, content))
        elif kind == 2:
            del members[at]
        else:
            members[at] = (name, inner(random, content, [content for _, content in members]))
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, content in members:
                entry = zipfile.ZipInfo(name.encode("utf-8", "replace").decode() or "x")
                entry.compress_type = archive.compression
                # a duplicate name is a valid case, so ignore zipfile's warning
                archive.NameToInfo.pop(entry.filename, None)
                archive.writestr(entry, content)
        return packed.getvalue()

    return mutate


def of_names(kind: type[Message], inner: Mutation) -> Mutation:
    """Return a mutation that replaces one or two names in a protobuf message with hostile names. The mutation replaces
    all uses of a name, so that the message stays consistent. In half of the cases, it also applies `inner`.
    """

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        message = kind()
        message.ParseFromString(data)
        for _ in range(random.randint(0, 2)):
            held = list(_texts_of(message))
            name = random.choice([text for text, _ in held if text] or [""])
            hostile = name + random.choice(ESCAPES)
            for text, put in held:
                if text and text == name:
                    put(hostile)
        changed = message.SerializePartialToString()
        return inner(random, changed, others) if random.random() < 0.5 else changed

    return mutate


def _texts_of(message: Message) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Yield the names of nodes and tensors in a message, each with a function that replaces the name."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _texts_of(inner)
        elif field.name in ("input", "output"):
            for place, text in enumerate(value):
                yield text, functools.partial(value.__setitem__, place)
        elif field.name == "name" and message.DESCRIPTOR.name != "AttributeProto":
            yield value, functools.partial(setattr, message, "name")


def of_message(kind: type[Message]) -> Mutation:
    """Return a mutation that changes the fields of a protobuf message of this type, including nested fields."""

    def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        if random.random() < 0.2:
            return of_bytes(random, data, others)
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return of_bytes(random, data, others)
        for _ in range(random.randint(1, 3)):
            _change_message(random, message)
        return message.SerializeToString()[:MOST_BYTES]

    return mutate


def _change_message(random: Random, whole: Message) -> None:
    messages: list[Message] = []
    texts: list[Any] = [*TEXTS[:5], *TEXTS[6:10], *ESCAPES]

    def walk(message: Message) -> None:
        messages.append(message)
        for field, value in message.ListFields():
            values = value if field.is_repeated else [value]
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for inner in values:
                    walk(inner)
            elif field.type == FieldDescriptor.TYPE_STRING:
                texts.extend(values)

    walk(whole)
    message = random.choice(messages)
    present = [field for field, _ in message.ListFields()]
    fields = present if present and random.random() < 0.7 else list(message.DESCRIPTOR.fields)
    field = random.choice(fields)
    repeated = field.is_repeated
    if repeated and random.random() < 0.4:
        held = getattr(message, field.name)
        if len(held):
            at = random.randrange(len(held))
            if random.random() < 0.5:
                del held[at]
            else:
                held.append(held[at])
        return
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        same = [other for other in messages if field.message_type == other.DESCRIPTOR]
        copied = copy.deepcopy(random.choice(same)) if same else None
        target = getattr(message, field.name).add() if repeated else getattr(message, field.name)
        if copied is not None and copied.ByteSize() < 65536:
            target.CopyFrom(copied)
        else:
            target.SetInParent()
        return
    value = _value(random, field, texts)
    if value is None:
        message.ClearField(field.name)
    elif repeated:
        held = getattr(message, field.name)
        if len(held) and random.random() < 0.7:
            held[random.randrange(len(held))] = value
        else:
            held.append(value)
    else:
        setattr(message, field.name, value)


def _value(random: Random, field: FieldDescriptor, texts: Sequence[Any]) -> Any:
    if random.random() < 0.1:
        return None
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(texts)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice((b"", b"\0" * random.choice((1, 4, 1000)), random.randbytes(16)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return random.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return random.choice(field.enum_type.values).number
    wide = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
    low = 0 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else -1
    most = 2**63 - 1 if wide else 2**31 - 1
    return random.choice([n for n in (*SIZES, random.randrange(40)) if low <= n <= most])
