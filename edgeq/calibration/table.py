"""Write, read and check calibration tables: ONNX Runtime's three files and TensorRT's native cache.

ONNX Runtime's TensorRT provider reads one number for each tensor: its largest magnitude as decimal text.

- `calibration.flatbuffers`: a TrtTable in the flatbuffers format. The keys are in ascending order, because readers use
  binary search;
- `calibration.json`: the same content as a JSON object;
- `calibration.cache`: lines "name value".

TensorRT's native cache begins with a line "TRT-<version>-<algorithm>". Then it has a line "name: <hex>" for each
tensor, with the big-endian bits of a float32 scale. The magnitude is 127 times the scale.

edgeq writes a TrtTable with the flatbuffers package. It reads a TrtTable with its own code, which checks all bounds.
The schema (namespace CalTableFlatBuffers) is: table KeyValue {key: string (required, key); value: string}; table
TrtTable {dict: [KeyValue]}; root type TrtTable.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import flatbuffers
import numpy as np
from edgeq_device.system.files import open_file, read_file

from edgeq.calibration.ranges import Range
from edgeq.errors import CalibrationError, OutputError
from edgeq.util.marker import is_plain
from edgeq.util.outputs import output_file
from edgeq.util.ownership import printable_path
from edgeq.util.record_files import is_longer

DICT, KEY, VALUE = 0, 0, 1
"""Slots of a table: the numbers of its fields, in the order of the schema."""
LONGEST_VALUE = 256
"""Largest length of a number's decimal text, in bytes."""


def encode_table(table: Mapping[str, str]) -> bytes:
    """Return the bytes of a TrtTable of name → decimal text. Keys are sorted by their bytes, the order that flatbuffers
    uses.
    """
    # The builder grows by itself from this size in bytes.
    builder = flatbuffers.Builder(1024)
    pairs = []
    for name, value in sorted(table.items(), key=lambda pair: pair[0].encode()):
        key, text = builder.CreateString(name), builder.CreateString(value)
        builder.StartObject(2)
        builder.PrependUOffsetTRelativeSlot(KEY, key, 0)
        builder.PrependUOffsetTRelativeSlot(VALUE, text, 0)
        pairs.append(builder.EndObject())
    builder.StartVector(4, len(pairs), 4)
    # A flatbuffer is built from its end to its beginning.
    for pair in reversed(pairs):
        builder.PrependUOffsetTRelative(pair)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(DICT, vector, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def decode_table(content: bytes) -> list[tuple[str, str]]:
    """Return the pairs of a TrtTable, in the order of the table.

    Raises:
        ValueError, IndexError, struct.error, UnicodeDecodeError: the bytes are not a TrtTable.
    """
    view = _View(content)
    vector = view.field(view.follow(0), DICT)
    if vector is None:
        return []
    count = view.unsigned(vector)
    # Each entry takes four bytes, so a larger count is damage. The check comes before the loop, which would be long.
    if count > len(content) // 4:
        raise ValueError("its vector is longer than the file")
    pairs = []
    # Tensor names are unique, so in a valid file each name has its own bytes, and all names together are shorter than
    # the file. Without this limit, a megabyte of offsets to one long name would become gigabytes of text.
    remaining = len(content)
    for index in range(count):
        pair = view.follow(vector + 4 + 4 * index)
        key, value = view.field(pair, KEY), view.field(pair, VALUE)
        if key is None or value is None:
            raise ValueError("an entry lacks its key or value")
        name, text = view.string(key, remaining), view.string(value, LONGEST_VALUE)
        remaining -= len(name)
        pairs.append((name, text))
    return pairs


class _View:
    """Follow the offsets of a flatbuffer. An offset that leaves the buffer raises an error."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def unsigned(self, at: int) -> int:
        """Return the little-endian uint32 at byte `at`."""
        return int(struct.unpack_from("<I", self._content, self._inside(at, 4))[0])

    def follow(self, at: int) -> int:
        """Return the position that the offset at byte `at` points to. Offsets are relative to their own position."""
        return self._inside(at + self.unsigned(at), 4)

    def field(self, table: int, slot: int) -> int | None:
        """Return the position to which the offset in field `slot` of the table at `table` points. Return None if the
        field is absent.
        """
        (distance,) = struct.unpack_from("<i", self._content, self._inside(table, 4))
        vtable = self._inside(table - distance, 4)
        (size,) = struct.unpack_from("<H", self._content, vtable)
        place = 4 + 2 * slot
        if place + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self._content, self._inside(vtable + place, 2))
        return self.follow(table + offset) if offset else None

    def string(self, at: int, limit: int) -> str:
        """Return the text at byte `at`, of at most `limit` bytes. A text is stored as its length in bytes (uint32),
        followed by its UTF-8 bytes.
        """
        length = self.unsigned(at)
        if length > limit:
            raise ValueError(f"a text has {length} bytes, more than possible")
        self._inside(at + 4, length)
        return self._content[at + 4 : at + 4 + length].decode()

    def _inside(self, at: int, size: int) -> int:
        if at < 0 or at + size > len(self._content):
            raise ValueError("an offset leaves the file")
        return at


FLATBUFFERS, JSON, CACHE = "calibration.flatbuffers", "calibration.json", "calibration.cache"
# A TensorRT scale is the largest magnitude over this number.
LEVELS = 127
# Readers of the tables parse the numbers as float32.
_LARGEST = float(np.finfo(np.float32).max)
MAX_BYTES = 2**25
"""Largest permitted size of a table file, in bytes."""

Table = dict[str, float]
"""Largest magnitude (a float32 value) by tensor name."""


def table_of(ranges: Mapping[str, Range], tensors: Collection[str] | None = None) -> Table:
    """Return the calibration table for some ranges.

    Args:
        tensors: names that the table must contain; None means the names in `ranges`.

    Raises:
        CalibrationError: a tensor is missing, or its range is not finite or exceeds float32.
    """
    missing = sorted(set(tensors or ()) - set(ranges))
    if missing:
        raise CalibrationError(
            f"tensor {missing[0]!r} has no range ({len(missing)} tensors have none)",
            "Calibrate all float activations",
        )
    table = {}
    for name, span in sorted(ranges.items()):
        if not all(abs(bound) <= _LARGEST for bound in (span.low, span.high)):
            raise CalibrationError(f"tensor {name!r} has the range {span.low}..{span.high}", "Calibrate it again")
        table[name] = float(np.float32(max(abs(span.low), abs(span.high))))
    return table


def write_tables(directory: Path, ranges: Mapping[str, Range], *, tensors: Collection[str] | None = None) -> None:
    """Write ONNX Runtime's three tables into `directory`, and read them back as a check. Create the directory if
    needed.

    Args:
        tensors: names that the tables must contain.

    Raises:
        CalibrationError: for the same reasons as `table_of`, or if the text form cannot represent a name.
        OutputError: `directory` cannot be written, or a file that is not a table has the name of a table.
    """
    table = table_of(ranges, tensors)
    for name in table:
        # A line of the text form ends the name at the first space.
        if not name or any(c.isspace() for c in name):
            raise CalibrationError(
                f"tensor name {name!r} is empty or contains white space, which {CACHE} cannot represent",
                "Rename the tensor",
            )
    text = {name: _decimal(value) for name, value in table.items()}
    forms = {
        FLATBUFFERS: encode_table(text),
        JSON: (json.dumps(text, indent=1, ensure_ascii=False) + "\n").encode(),
        CACHE: "".join(f"{name} {value}\n" for name, value in text.items()).encode(),
    }
    readers = {FLATBUFFERS: read_flatbuffers, JSON: read_json, CACHE: read_cache}
    # All three paths are checked before the first file is written.
    for name in forms:
        check_table(directory / name)
    with output_file(directory / FLATBUFFERS, force=True, ours=is_table) as draft:
        for name, content in forms.items():
            draft.with_name(name).write_bytes(content)
            # A table with one wrong digit would only show as lost accuracy on the device.
            if readers[name](draft.with_name(name)) != table:
                raise CalibrationError(f"{directory / name} does not read back as it was written", "Report this")


def read_tables(directory: Path) -> Table:
    """Read the three tables and check that they contain the same ranges."""
    table = read_flatbuffers(directory / FLATBUFFERS)
    # If the three disagreed, the result would depend on which of them a tool reads.
    for name, variant in ((JSON, read_json(directory / JSON)), (CACHE, read_cache(directory / CACHE))):
        if variant != table:
            raise CalibrationError(f"{directory / name} differs from {FLATBUFFERS}", "Write the tables again")
    return table


def unpack_tables(path: Path, folder: Path) -> None:
    """Unpack the three tables of a bundle's first variant from its calibration.zip into `folder`.

    Raises:
        CalibrationError: the file does not contain the three tables.
    """
    try:
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            for name in (FLATBUFFERS, JSON, CACHE):
                with archive.open(f"calibration/{name}") as member:
                    content = member.read(MAX_BYTES + 1)
                (folder / name).write_bytes(content)  # If the content is too large, the reader refuses it.
    except (KeyError, OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise CalibrationError(
            f"{path} does not contain the tables of a bundle ({error})", "Give calibration.zip"
        ) from error


def read_table(path: Path) -> Table:
    """Read a calibration table in any of the four forms. The content and the suffix of the file determine the form."""
    content = _read_file(path)
    if content.startswith(b"TRT-"):
        return read_native(path)
    if path.suffix == ".json" or content[:1] == b"{":
        return read_json(path)
    return read_cache(path) if path.suffix == ".cache" else read_flatbuffers(path)


def check_table(path: Path) -> None:
    """Refuse an output path at which there is anything but a calibration table. A new table may replace an old one.

    Raises:
        OutputError: there is another file at `path`.
    """
    if (path.exists() or path.is_symlink()) and not is_table(path):
        raise OutputError(f"{printable_path(path)} is not a calibration table", "Move it, or choose another output")


def is_table(path: Path) -> bool:
    """Return whether a regular file is a calibration table in one of the four forms."""
    if not is_plain(path):
        return False
    try:
        read_table(path)
    except CalibrationError:
        return False
    return True


def read_flatbuffers(path: Path) -> Table:
    """Read a table in ONNX Runtime's flatbuffers form.

    Raises:
        CalibrationError: the file is damaged, or has another form.
    """
    try:
        pairs = decode_table(_read_file(path))
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} is not a calibration table: {error}", "Write it again") from error
    names = [name.encode() for name, _ in pairs]
    # Readers look keys up by binary search, which misses keys of an unsorted table without an error.
    if names != sorted(names):
        raise CalibrationError(f"{path} has unsorted keys, so looking up a key fails", "Write it again")
    return _table(path, pairs)


def read_json(path: Path) -> Table:
    """Read a table in ONNX Runtime's JSON form: tensor name → largest magnitude as text.

    Raises:
        CalibrationError: the file is damaged, or has another form.
    """
    try:
        # A dict would hide that a name occurs twice.
        pairs = json.loads(_read_file(path), object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{path} is not JSON: {error}", "Write it again") from error
    if not isinstance(pairs, list) or not all(isinstance(p, tuple) and isinstance(p[1], str) for p in pairs):
        raise CalibrationError(f"{path} is not an object of strings", "Write it again")
    return _table(path, pairs)


def read_cache(path: Path) -> Table:
    """Read a table in ONNX Runtime's text form: a line "name value" for each tensor.

    Raises:
        CalibrationError: the file is damaged, or has another form.
    """
    # Only the last space of a line separates, in case a name contains one.
    lines = [line.rsplit(" ", 1) for line in _text(path).splitlines()]
    if any(len(line) != 2 for line in lines):
        raise CalibrationError(f"{path} has a line that is not 'name value'", "Write it again")
    return _table(path, [(line[0], line[1]) for line in lines])


def write_native(
    path: Path, ranges: Mapping[str, Range], *, version: str = "8601", algorithm: str = "EntropyCalibration2"
) -> None:
    """Write TensorRT's native cache, and read it back as a check. A tensor of range 0 gets the smallest normal scale.

    Args:
        version: TensorRT's version as the first line contains it ("8601" for 8.6.1).
        algorithm: name of the calibrator.
    """
    table = table_of(ranges)
    if not re.fullmatch(r"[0-9]+", version) or not re.fullmatch(r"[A-Za-z0-9]+", algorithm):
        raise CalibrationError(
            f"TRT-{version}-{algorithm} is not a first line of a TensorRT cache", "Use digits and letters"
        )
    # A line break in a name would add a line of its own to the table.
    if any("\n" in name or "\r" in name for name in table):
        raise CalibrationError(
            "a tensor name contains a line break, which TensorRT's cache cannot represent", "Rename it"
        )
    scales = {name: _scale(value) for name, value in table.items()}
    lines = [f"TRT-{version}-{algorithm}", *(f"{n}: {struct.pack('>f', s).hex()}" for n, s in scales.items())]
    check_table(path)
    with output_file(path, force=True) as draft:
        draft.write_bytes("".join(f"{line}\n" for line in lines).encode())
        if read_native(draft) != {name: float(np.float32(scale * LEVELS)) for name, scale in scales.items()}:
            raise CalibrationError(f"{path} does not read back as it was written", "Report this")


def read_native(path: Path) -> Table:
    """Read TensorRT's native cache, and return the magnitude (127 times the scale) of each tensor by name."""
    head, *lines = _text(path).splitlines() or [""]
    if not re.fullmatch(r"TRT-[0-9]+-[A-Za-z0-9]+", head.strip()):
        raise CalibrationError(f"{path} does not begin with TRT-<version>-<algorithm>", "Give a TensorRT cache")
    table = {}
    for line in lines:
        match = re.fullmatch(r"(.*): ([0-9a-fA-F]{1,8})", line)
        if match is None:
            raise CalibrationError(f"{path} has a line that is not 'name: hex': {line[:80]!r}", "Write it again")
        (scale,) = struct.unpack(">f", bytes.fromhex(match[2].zfill(8)))
        _check(path, match[1], scale)
        if match[1] in table:
            raise CalibrationError(f"{path} names tensor {match[1]!r} twice", "Write it again")
        # The same roundings as in `write_native`, so that a table reads back as it was written.
        table[match[1]] = _float32(_float32(scale) * LEVELS)
        _check(path, match[1], table[match[1]])
    return table


def _scale(bound: float) -> float:
    tiny = float(np.finfo(np.float32).tiny)
    return float(np.float32(max(bound / LEVELS, tiny)))


def _decimal(value: float) -> str:
    """Return the shortest decimal text that reads back as the same float32."""
    return str(np.float32(value))


def _table(path: Path, pairs: list[tuple[str, str]]) -> Table:
    table = {}
    for name, text in pairs:
        try:
            value = _float32(float(text))
        except ValueError as error:
            raise CalibrationError(f"{path}: tensor {name!r} has the value {text!r}", "Write it again") from error
        _check(path, name, value)
        if name in table:
            raise CalibrationError(f"{path} names tensor {name!r} twice", "Write it again")
        table[name] = value
    return table


def _float32(value: float) -> float:
    """Return the nearest float32; infinity if the value is too large."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _check(path: Path, name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise CalibrationError(f"{path}: tensor {name!r} has the magnitude {value}", "Calibrate it again")


def _text(path: Path) -> str:
    try:
        return _read_file(path).decode()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not text", "Give a calibration table") from error


def _read_file(path: Path) -> bytes:
    try:
        if is_longer(path, MAX_BYTES):
            raise CalibrationError(f"{path} is larger than {MAX_BYTES >> 20} MiB", "Give a calibration table")
        return read_file(path)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror}", "Check the path") from error
