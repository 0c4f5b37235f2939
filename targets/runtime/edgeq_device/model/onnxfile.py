"""Find an ONNX file's references to data outside it. The file is read in protobuf's wire format, and the model is not
loaded.

A device has no protobuf package, and onnxruntime must not open the file before its external data have been checked. The
reader follows only the fields that lead to tensors. It skips everything else by its length, weights included.

Protobuf merges or ignores some things that no ONNX writer produces: a singular message that occurs twice, a known field
of another wire type, groups. The reader refuses a file with such things, because two readers that treat them
differently would see two models.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Set, Tuple, Union

from edgeq_device.errors import AGAIN, BundleError
from edgeq_device.system.files import open_file

MAX_BYTES = (1 << 31) - 1
"""Largest file that protobuf, and so onnxruntime, can parse."""
MAX_DEPTH = 100
"""Deepest nesting of messages: protobuf's own limit."""
MAX_FIELDS = 5_000_000
MAX_DIMS = 64
ELEMENT_BITS: Mapping[int, int] = {
    **dict.fromkeys((25, 26), 2),  # UINT2, INT2
    **dict.fromkeys((21, 22, 23), 4),  # UINT4, INT4, FLOAT4E2M1
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),  # UINT8, INT8, BOOL, FLOAT8E4M3FN ... FLOAT8E8M0
    **dict.fromkeys((4, 5, 10, 16), 16),  # UINT16, INT16, FLOAT16, BFLOAT16
    **dict.fromkeys((1, 6, 12), 32),  # FLOAT, INT32, UINT32
    **dict.fromkeys((7, 11, 13, 14), 64),  # INT64, DOUBLE, UINT64, COMPLEX64
    15: 128,  # COMPLEX128
}
"""Bits of one element, keyed by TensorProto.DataType. Strings (8) have no fixed size and cannot be external."""
_SHOWN = 60
_LONGEST_TEXT = 4096

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TENSOR, _EXTERNAL = "TensorProto", 1

# Message → field → type of the message inside. Field numbers are those of onnx.proto.
_INSIDE: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: _TENSOR, 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: _TENSOR,
        6: "GraphProto",
        10: _TENSOR,
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: _TENSOR, 2: _TENSOR},
}
_SINGULAR: Mapping[str, FrozenSet[int]] = {
    "ModelProto": frozenset({7}),
    "TrainingInfoProto": frozenset({1, 2}),
    "AttributeProto": frozenset({5, 6, 22}),
    "SparseTensorProto": frozenset({1, 2}),
}
_OP_TYPE = 4  # of NodeProto
_METADATA = 14  # of ModelProto
_CONTEXT = b"EPContext"
_ATTRIBUTE = 5  # of NodeProto
_NAME, _INTEGER = 1, 3  # of AttributeProto
_EMBEDDED = b"embed_mode"

# Tags of lists that store each number as a field of its own. A regular expression skips long runs of such fields fast.
_RUNS: Mapping[str, Mapping[int, "re.Pattern[bytes]"]] = {
    "AttributeProto": {
        0x3D: re.compile(rb"(?:\x3d.{4}){1,4096}", re.S),
        0x40: re.compile(rb"(?:\x40[\x80-\xff]{0,9}[\x00-\x7f]){1,4096}", re.S),
    },
    _TENSOR: {
        0x25: re.compile(rb"(?:\x25.{4}){1,4096}", re.S),
        0x28: re.compile(rb"(?:\x28[\x80-\xff]{0,9}[\x00-\x7f]){1,4096}", re.S),
        0x38: re.compile(rb"(?:\x38[\x80-\xff]{0,9}[\x00-\x7f]){1,4096}", re.S),
        0x51: re.compile(rb"(?:\x51.{8}){1,4096}", re.S),
        0x58: re.compile(rb"(?:\x58[\x80-\xff]{0,9}[\x00-\x7f]){1,4096}", re.S),
    },
}
_NO_RUNS: Mapping[int, "re.Pattern[bytes]"] = {}


@dataclass(frozen=True)
class ExternalTensor:
    """Describe a tensor whose location or entries refer to data outside the file.

    Attributes:
        name: name, shortened for messages.
        data_type: number of TensorProto.DataType, 0 if the tensor has none.
        dims: sizes, none of them negative.
        entries: entries of external_data in the file; no key occurs twice.
    """

    name: str
    data_type: int
    dims: Tuple[int, ...]
    entries: Mapping[str, str]


@dataclass(frozen=True)
class OnnxFile:
    """Hold the references that were found in an ONNX file.

    Attributes:
        external: tensors with external data, in the order of the file.
        has_context: True if a node contains code compiled for an execution provider, or names a file that contains such
            code.
        context_outside: True if such a node names a file, or does not state that its code is inside the model.
    """

    external: Tuple[ExternalTensor, ...]
    has_context: bool
    context_outside: bool = False


def read_onnx(path: Path, title: str) -> OnnxFile:
    """Read the ONNX file at `path` and return its references. Messages call the file `title`.

    Raises:
        BundleError: it is not an ONNX file that onnxruntime can read, or no ONNX writer would produce it.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise BundleError(f"{title} has {size} bytes; an ONNX file has {MAX_BYTES} at most")
        if size == 0:
            raise BundleError(f"{title} is empty")
        with open_file(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return walk_onnx(data, title)
    except (OSError, ValueError) as error:
        raise BundleError(f"{title} cannot be read ({error})") from error


def read_metadata(model: Union[Path, bytes], key: str, title: str) -> Optional[bytes]:
    """Return the value of entry `key` in the metadata of an ONNX file. Nothing else in the file is read.

    Return None if there is no such entry, or if the file does not consist of protobuf fields. Such a file causes an
    error later, when it is opened.

    Raises:
        BundleError: the entry occurs twice.
    """
    if isinstance(model, bytes):
        values = _find_entries(model, key.encode())
    else:
        try:
            with open_file(model) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                values = _find_entries(data, key.encode())
        except (OSError, ValueError):  # the file is missing, or is empty and cannot be mapped
            return None
    if len(values) > 1:
        raise BundleError(f"{title} has {key!r} twice in its metadata", AGAIN)
    return values[0] if values else None


_HELD = b"ep_cache_context"
_TEXT = 4  # of AttributeProto


def read_context(path: Path, title: str) -> bytes:
    """Return the compiled code in the only node of an ONNX file. An execution provider runs that code.

    Raises:
        BundleError: the file cannot be read, or does not contain exactly one compiled model.
    """
    try:
        with open_file(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            codes = [bytes(data[at:end]) for at, end in _find_compiled_code(_Walk(data, title), len(data))]
    except (OSError, ValueError) as error:
        raise BundleError(f"{title} cannot be read ({error})") from error
    if len(codes) != 1:
        raise BundleError(f"{title} contains {len(codes)} compiled models instead of one", AGAIN)
    return codes[0]


def _find_compiled_code(walk: _Walk, size: int) -> Iterator[Tuple[int, int]]:
    """Yield the start and the end of each node's compiled code."""
    for at, end in _select_fields(walk, 7, 0, size):
        for node in _select_fields(walk, 1, at, end):
            for attribute in _select_fields(walk, _ATTRIBUTE, *node):
                names = [bytes(walk.data[a:b]) for a, b in _select_fields(walk, _NAME, *attribute)]
                if names == [_HELD]:
                    yield from _select_fields(walk, _TEXT, *attribute)


def _select_fields(walk: _Walk, number: int, at: int, end: int) -> Iterator[Tuple[int, int]]:
    return ((a, b) for n, wire, a, b in walk.read_fields(at, end, _NO_RUNS) if n == number and wire == _BYTES)


def _find_entries(data: Any, key: bytes) -> List[bytes]:
    walk = _Walk(data, "")
    values = []
    try:
        for number, wire, at, end in walk.read_fields(0, len(data), _NO_RUNS):
            if number == _METADATA and wire == _BYTES:
                entry = {
                    n: data[start:stop] for n, w, start, stop in walk.read_fields(at, end, _NO_RUNS) if w == _BYTES
                }
                if entry.get(1) == key:
                    values.append(bytes(entry.get(2, b"")))
    except BundleError:
        return []
    return values


def walk_onnx(data: Any, title: str) -> OnnxFile:
    """Do the work of `read_onnx` on bytes, or on an object that can be indexed, sliced and searched like bytes."""
    # Files in onnxruntime's own format have this mark, and onnxruntime opens them under any file name.
    if data[4:8] == b"ORTM":
        raise BundleError(f"{title} is in ONNX Runtime's own format; a bundle contains ONNX files")
    walk = _Walk(data, title)
    walk.check_message("ModelProto", 0, len(data), 1)
    return OnnxFile(tuple(walk.external), walk.has_context, walk.context_outside)


class _Walk:
    def __init__(self, data: Any, title: str) -> None:
        self.data = self._data = data
        self._title = title
        self._remaining = MAX_FIELDS
        self.external: List[ExternalTensor] = []
        self.has_context = False
        self.context_outside = False

    def check_message(self, kind: str, at: int, end: int, depth: int) -> None:
        """Check the protobuf message of type `kind` in bytes `at` to `end`, and the messages inside it. `depth` is the
        depth of nesting.

        Raises:
            BundleError: messages are nested too deeply, are malformed, or have a field that is not allowed.
        """
        if depth > MAX_DEPTH:
            raise self._build_error(f"messages nest deeper than {MAX_DEPTH}")
        inside, singular = _INSIDE[kind], _SINGULAR.get(kind, frozenset())
        numbers: Set[int] = set()
        for number, wire, value, stop in self.read_fields(at, end, _RUNS.get(kind, _NO_RUNS)):
            child = inside.get(number)
            if child is not None:
                self._check_wire(wire, _BYTES, kind, number)
                if number in singular:
                    self._check_once(numbers, number, kind)
                if child == _TENSOR:
                    self._check_tensor(value, stop, depth + 1)
                else:
                    self.check_message(child, value, stop, depth + 1)
            elif kind == "NodeProto" and number == _OP_TYPE and self._data[value:stop] == _CONTEXT:
                self.has_context = True
                self.context_outside |= not self._is_embedded(at, end)

    def _is_embedded(self, at: int, end: int) -> bool:
        """Return whether a node states exactly once that its compiled code is inside the model."""
        modes = []
        for number, wire, value, stop in self.read_fields(at, end, _NO_RUNS):
            if number == _ATTRIBUTE and wire == _BYTES:
                fields = [
                    (n, w, v, s) for n, w, v, s in self.read_fields(value, stop, _NO_RUNS) if n in (_NAME, _INTEGER)
                ]
                if any(n == _NAME and w == _BYTES and self._data[v:s] == _EMBEDDED for n, w, v, s in fields):
                    modes.append([v for n, w, v, _ in fields if n == _INTEGER and w == _VARINT])
        return modes == [[1]]

    def _check_tensor(self, at: int, end: int, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise self._build_error(f"messages nest deeper than {MAX_DEPTH}")
        dims: List[int] = []
        entries: Dict[str, str] = {}
        numbers: Dict[int, int] = {}
        name = ""
        external = False
        numbers_read: Set[int] = set()
        for number, wire, value, stop in self.read_fields(at, end, _RUNS[_TENSOR]):
            if number == 1:
                dims.extend(self._read_dims(wire, value, stop))
            elif number in (2, 14):
                self._check_wire(wire, _VARINT, _TENSOR, number)
                self._check_once(numbers_read, number, _TENSOR)
                numbers[number] = value
            elif number == 8:
                self._check_wire(wire, _BYTES, _TENSOR, number)
                self._check_once(numbers_read, number, _TENSOR)
                name = self._data[value : min(stop, value + _SHOWN)].decode("utf-8", "replace")
            elif number == 13:
                self._check_wire(wire, _BYTES, _TENSOR, number)
                external = True
                key, text = self._read_entry(value, stop)
                if key in entries:
                    raise self._build_error(f"tensor {name!r} gives the {key[:_SHOWN]!r} of its external data twice")
                entries[key] = text
        location = numbers.get(14, 0)
        # A reader that truncates the number to 32 bits would see another location.
        if location not in (0, _EXTERNAL):
            raise self._build_error(f"tensor {name!r} has the data location {location}")
        if external or location == _EXTERNAL:
            if len(dims) > MAX_DIMS or any(size >> 63 for size in dims):
                raise self._build_error(f"tensor {name!r} has more than {MAX_DIMS} dimensions, or a negative one")
            self.external.append(ExternalTensor(name, numbers.get(2, 0), tuple(dims), entries))

    def _read_dims(self, wire: int, value: int, stop: int) -> Iterator[int]:
        if wire == _VARINT:
            yield value
            return
        self._check_wire(wire, _BYTES, _TENSOR, 1)
        while value < stop:
            self._remaining -= 1
            if self._remaining < 0:
                raise self._build_error(f"it has more than {MAX_FIELDS} fields")
            size, value = self._read_varint(value, stop)
            yield size

    def _read_entry(self, at: int, end: int) -> Tuple[str, str]:
        texts: Dict[int, str] = {}
        numbers: Set[int] = set()
        for number, wire, value, stop in self.read_fields(at, end, _NO_RUNS):
            if number in (1, 2):
                self._check_wire(wire, _BYTES, "StringStringEntryProto", number)
                self._check_once(numbers, number, "StringStringEntryProto")
                if stop - value > _LONGEST_TEXT:
                    raise self._build_error(f"external data have a text of {stop - value} bytes")
                try:
                    texts[number] = self._data[value:stop].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise self._build_error("external data have a text that is not UTF-8") from error
        return texts.get(1, ""), texts.get(2, "")

    def read_fields(
        self, at: int, end: int, runs: Mapping[int, "re.Pattern[bytes]"]
    ) -> Iterator[Tuple[int, int, int, int]]:
        """Yield a tuple for each field from `at` to `end`: its number, its wire type, its value or the position of its
        first byte, and the position after its last byte.
        """
        data = self._data
        remaining = self._remaining
        while at < end:
            self._remaining = remaining = self._remaining - 1
            if remaining < 0:
                raise self._build_error(f"it has more than {MAX_FIELDS} fields")
            start = at
            tag = data[at]
            at += 1
            if tag in runs:
                run = runs[tag].match(data, start, end)
                if run is not None:
                    at = run.end()
                    continue
            if tag > 0x7F:
                tag, at = self._read_varint(start, end)
            number, wire = tag >> 3, tag & 7
            if number == 0 or tag >> 32:
                raise self._build_error(f"byte {start} begins a field without a number")
            if wire == _BYTES:
                if at < end and data[at] < 0x80:
                    size = data[at]
                    at += 1
                else:
                    size, at = self._read_varint(at, end)
                if size > end - at:
                    raise self._build_error(f"a field at byte {start} is longer than the message around it")
                yield number, wire, at, at + size
                at += size
            elif wire == _VARINT:
                value, at = self._read_varint(at, end)
                yield number, wire, value, at
            elif wire in (_FIXED32, _FIXED64):
                size = 4 if wire == _FIXED32 else 8
                if size > end - at:
                    raise self._build_error(f"a field at byte {start} is longer than the message around it")
                yield number, wire, at, at + size
                at += size
            else:
                raise self._build_error(f"byte {start} begins a field of wire type {wire}, which ONNX does not have")

    def _read_varint(self, at: int, end: int) -> Tuple[int, int]:
        """Return the number that begins at `at`, and the position after it."""
        value = shift = 0
        while shift < 70:
            if at >= end:
                break
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                return value, at
            shift += 7
        raise self._build_error(f"the number before byte {at} is cut off or too long")

    def _check_wire(self, wire: int, expected: int, kind: str, number: int) -> None:
        if wire != expected:
            raise self._build_error(f"field {number} of {kind} has wire type {wire}")

    def _check_once(self, numbers: Set[int], number: int, kind: str) -> None:
        if number in numbers:
            raise self._build_error(f"field {number} of {kind} occurs twice")
        numbers.add(number)

    def _build_error(self, problem: str) -> BundleError:
        return BundleError(f"{self._title} is not a valid ONNX file: {problem}", AGAIN)
