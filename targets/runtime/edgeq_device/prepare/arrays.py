"""Read and write arrays in numpy's file formats, and exchange frames of arrays over a pipe.

A frame carries a request or an answer between edgeq and a program that it runs elsewhere. It consists of the length of
a JSON text (4 bytes, little endian), the text, and the bytes of the arrays that the text lists.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from edgeq_device.bundle.onnxfile import DTYPES
from edgeq_device.errors import DataError, DeviceError, UsageError
from edgeq_device.system.budget import VARIABLE, read_largest_sample
from edgeq_device.system.files import open_file
from edgeq_device.system.plainjson import MAX_BYTES, parse_json

MAX_ARRAY_BYTES = 1 << 32


def to_array(value: Any) -> "np.ndarray[Any, Any]":
    """Convert the value of one session output to an array that an .npz can store.

    Texts become an array of NumPy's own text type. The parts of a sequence are flattened and joined into one row. An
    absent optional value becomes an array without elements.
    """
    if isinstance(value, list):
        parts = [to_array(part).ravel() for part in value]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)
    array = np.empty(0, np.float32) if value is None else np.asarray(value)
    texts = array.dtype.hasobject and all(isinstance(text, str) for text in array.flat)
    return array.astype(str) if texts else array


def write_npz(
    target: Union[Path, IO[bytes]], arrays: Mapping[str, "np.ndarray[Any, Any]"], level: Optional[int] = None
) -> None:
    """Write a compressed .npz whose bytes depend only on names and values: members are sorted and have a fixed date.

    Args:
        level: compression level, 0 to 9; None selects zlib's default.

    Raises:
        DataError: an array contains Python objects, which would need pickle.
    """
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(arrays):
            buffer = io.BytesIO()
            try:
                np.lib.format.write_array(buffer, np.asarray(arrays[name], order="C"), allow_pickle=False)
            except ValueError as error:
                raise DataError(
                    f"{name!r} contains Python objects, which an .npz without pickle cannot store"
                ) from error
            archive.writestr(make_entry(f"{name}.npy"), buffer.getvalue(), compresslevel=level)


def make_entry(name: str) -> zipfile.ZipInfo:
    """Return a zip entry that is compressed and depends only on its name. Its date is the earliest that a zip can
    store, because a real date would make two equal archives differ.
    """
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry


def read_arrays(path: Path) -> Dict[str, "np.ndarray[Any, Any]"]:
    """Return the arrays of an .npz by name, or the array of an .npy under the name "".

    `FILE.npz/GROUP` selects the arrays whose names begin with `GROUP/`, and removes that prefix.

    Raises:
        DataError: the file is missing, is not an .npz or .npy file, is truncated, contains pickled objects, or is
            larger than 4 GiB.
    """
    path, group = split_group(path)
    try:
        with open_file(path) as stream:
            magic = stream.read(2)
            stream.seek(0)
            if magic == b"PK":
                return _read_npz(stream, path, group)
            size = os.fstat(stream.fileno()).st_size
            return {"": _read_npy(stream, size, str(path))}
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Name an .npy or .npz file") from error


def split_group(path: Path) -> Tuple[Path, str]:
    """Return the file and "GROUP/" for `FILE.npz/GROUP`. For any other path, return the path and ""."""
    inside = path.parent.suffix == ".npz" and path.parent.is_file()
    return (path.parent, f"{path.name}/") if inside else (path, "")


def _read_npz(stream: IO[bytes], path: Path, group: str) -> Dict[str, "np.ndarray[Any, Any]"]:
    arrays: Dict[str, "np.ndarray[Any, Any]"] = {}
    try:
        with zipfile.ZipFile(stream) as archive:
            members = [info for info in archive.infolist() if info.filename.startswith(group)]
            if group and not members:
                raise DataError(f"{path} has no group {group[:-1]!r}")
            total = sum(info.file_size for info in members)
            limit = min(MAX_ARRAY_BYTES, path.stat().st_size + read_largest_sample())
            if total > limit:
                raise DataError(f"{path} unpacks to {total} bytes, more than {limit}", f"{VARIABLE} sets the limit")
            for info in members:
                name = info.filename[len(group) : -4]
                if not info.filename.endswith(".npy") or name in arrays:
                    raise DataError(f"{path}: member {info.filename!r} is not an array, or occurs twice")
                with archive.open(info) as member:
                    arrays[name] = _read_npy(member, info.file_size, f"{path}: {info.filename}")
    except DataError:
        raise
    except Exception as error:  # a damaged zip raises BadZipFile, zlib.error, EOFError, RuntimeError ...
        raise DataError(f"{path} is not a readable .npz ({error})", "Write it with numpy.savez") from error
    return arrays


def read_npy_header(stream: IO[bytes]) -> "Tuple[Tuple[int, ...], bool, np.dtype[Any]]":
    """Return the shape of an .npy stream, whether its values are in Fortran order, and its dtype. The stream is left at
    the first value.

    Raises:
        ValueError: the header is wrong.
        OSError: the stream cannot be read.
    """
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version[0]}.{version[1]} is not supported")
        with warnings.catch_warnings():
            # numpy warns about headers that Python 2 wrote, but it reads them.
            warnings.simplefilter("ignore", UserWarning)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(stream)
            return np.lib.format.read_array_header_2_0(stream)
    except OSError:
        raise
    # numpy parses the header as Python text, which raises TokenError, RecursionError, TypeError ...
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _read_npy(stream: IO[bytes], size: int, context: str) -> "np.ndarray[Any, Any]":
    fix = "Write it with numpy.save(..., allow_pickle=False)"
    if size > MAX_ARRAY_BYTES:
        raise DataError(f"{context} is larger than {MAX_ARRAY_BYTES} bytes")
    try:
        shape, fortran, dtype = read_npy_header(stream)
    except ValueError as error:
        raise DataError(f"{context} is not an .npy array ({error})", fix) from error
    if dtype.hasobject:
        raise DataError(f"{context} contains pickled Python objects", fix)
    data = stream.read(size)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected or min(shape, default=0) < 0:
        raise DataError(f"{context}: its header states {expected} bytes, but {len(data)} follow", fix)
    try:
        array = np.frombuffer(data, dtype=dtype)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    except (ValueError, OverflowError) as error:  # elements of zero bytes, or more dimensions than numpy supports
        raise DataError(f"{context} is not an .npy array ({error})", fix) from error


_MAX_BYTES = 1 << 31
_MADE_UP = {**DTYPES, "tensor(string)": "object"}


def parse_shapes(texts: Sequence[str]) -> Dict[str, Tuple[int, ...]]:
    """Return shapes by input name from texts such as "name=1,3,224,224" ("name=" means a scalar).

    Raises:
        UsageError: a text has another form, a size is less than 1, or a name occurs twice.
    """
    shapes: Dict[str, Tuple[int, ...]] = {}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        if not equals or not name or not re.fullmatch(r"([1-9]\d{0,9}([,x][1-9]\d{0,9})*)?", sizes):
            raise UsageError(f"{text!r} is not a shape", "Write it like input=1,3,224,224")
        if name in shapes:
            raise UsageError(f"two shapes are given for the input {name!r}", "Leave one out")
        shapes[name] = tuple(int(n) for n in re.split("[,x]", sizes)) if sizes else ()
    return shapes


def find_input_specs(session: Any, shapes: Mapping[str, Sequence[int]]) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
    """Return each input's dtype and concrete shape, keyed by input name. A shape in `shapes` takes precedence over the
    model's shape. In the model's shape, each open size becomes 1.

    Raises:
        UsageError: `shapes` contains an unknown input, or a shape that contradicts the model's.
        DataError: edgeq cannot make up values for an input, because it is a sequence or has an element type that numpy
            does not have.
    """
    specs = {}
    inputs = session.get_inputs()
    names = [i.name for i in inputs]
    for name in shapes:
        if name not in names:
            raise UsageError(f"the model has no input {name!r}", f"Its inputs are {', '.join(names)}")
    for tensor in inputs:
        if tensor.type not in _MADE_UP:
            raise DataError(
                f"values for the input {tensor.name!r} of type {tensor.type} cannot be made up", "Give data"
            )
        sizes: List[Optional[int]] = [d if isinstance(d, int) and d > 0 else None for d in tensor.shape]
        shape = tuple(shapes.get(tensor.name, [d or 1 for d in sizes]))
        # An input of unknown rank looks like a scalar here, so any shape is accepted for an input without sizes.
        if sizes and (len(shape) != len(sizes) or any(o is not None and o != s for o, s in zip(sizes, shape))):
            wants = ", ".join("?" if d is None else str(d) for d in sizes)
            raise UsageError(f"the input {tensor.name!r} has the shape [{wants}], not {list(shape)}", "Correct --shape")
        specs[tensor.name] = (np.dtype(_MADE_UP[tensor.type]), shape)
    return specs


def draw_feeds(
    session: Any, shapes: Optional[Mapping[str, Sequence[int]]] = None, *, count: int = 8, seed: int = 0
) -> List[Dict[str, np.ndarray]]:
    """Return `count` random samples that fit the inputs of the session.

    Floats are uniform in [0, 1). Integers are 0 or 1, which is valid for ids, masks and lengths alike. Strings are
    empty.

    Raises:
        UsageError, DataError: for the same reasons as `find_input_specs`, or if one sample would take more than 2 GiB.
    """
    specs = find_input_specs(session, shapes or {})
    size = sum(dtype.itemsize * int(np.prod(shape, dtype=object)) for dtype, shape in specs.values())
    if size > _MAX_BYTES:
        raise UsageError(f"one sample would take {size >> 20} MiB", "Give smaller shapes")
    count = max(1, min(count, _MAX_BYTES // 8 // max(1, size)))
    random = np.random.default_rng(seed)
    return [{name: _draw_values(random, dtype, shape) for name, (dtype, shape) in specs.items()} for _ in range(count)]


def _draw_values(random: np.random.Generator, dtype: np.dtype, shape: Tuple[int, ...]) -> np.ndarray:
    if dtype.kind == "f":
        return np.asarray(random.random(shape)).astype(dtype)
    if dtype.kind == "O":
        return np.full(shape, "", np.object_)
    return np.asarray(random.integers(0, 2, shape)).astype(dtype)


Arrays = Dict[str, "np.ndarray[Any, Any]"]
_LISTED = "arrays"
# Accept only plain numbers, texts of a fixed length and raw bytes. numpy would also accept structures and more.
_DTYPE = re.compile(r"[<>|=]?[biufcSUV]\d{1,6}")
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class FrameLimits:
    """Limit the sizes of a frame. A larger frame is refused before memory is allocated for it.

    Attributes:
        text: maximum size of the JSON in bytes.
        values: maximum number of values in the JSON; None: no limit.
        arrays: maximum number of arrays; None: no limit.
        array: maximum size of one array in bytes.
        total: maximum size of all arrays together in bytes; None: no limit.
    """

    text: int = MAX_BYTES
    values: Optional[int] = None
    arrays: Optional[int] = None
    array: int = MAX_ARRAY_BYTES
    total: Optional[int] = None


class LargeFrameError(ValueError):
    """Report arrays that are larger than the limits of a frame."""


DEFAULT_LIMITS = FrameLimits()


def read_frame(stream: IO[bytes], limits: FrameLimits = DEFAULT_LIMITS) -> Optional[Tuple[Dict[str, Any], Arrays]]:
    """Return the content and the arrays (by name) of the next frame, or None at the end of the stream.

    Raises:
        LargeFrameError: the arrays are larger than `limits` allow.
        ValueError: the bytes are not a frame, or another limit in `limits` is exceeded.
        EOFError: the stream ends within the frame.
    """
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    if size > limits.text:
        raise ValueError(f"a frame of {size} bytes")
    try:
        content = parse_json(_read_exactly(stream, size), "a frame", values=limits.values, halves=True)
    except DeviceError as error:
        raise ValueError(str(error)) from error
    listed = content.pop(_LISTED, None)
    if not isinstance(listed, list) or (limits.arrays is not None and len(listed) > limits.arrays):
        raise ValueError("a frame without a list of its arrays, or with too many")
    specs = [_parse_spec(entry, limits.array) for entry in listed]
    total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in specs)
    if limits.total is not None and total > limits.total:
        raise LargeFrameError(f"arrays of {total} bytes")
    arrays = {}
    for name, dtype, shape in specs:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(_read_exactly(stream, count * dtype.itemsize), dtype, count).reshape(shape)
    return content, arrays


def write_frame(stream: IO[bytes], content: Mapping[str, Any], arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Write one frame.

    Raises:
        DataError: an array contains Python objects (texts), which have no fixed bytes.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise DataError(f"tensor {name!r} contains texts, which cannot be sent to an emulated machine")
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**content, _LISTED: listed}).encode()
    stream.write(struct.pack("<I", len(text)) + text)
    for array in arrays.values():
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError(f"{len(data)} of {size} bytes")
    return data


def _parse_spec(entry: Any, largest: int) -> "Tuple[str, np.dtype[Any], List[int]]":
    """Return the name, dtype and shape of an array that a frame lists."""
    try:
        name, text, shape = entry
        is_spec = isinstance(name, str) and isinstance(shape, list) and _DTYPE.fullmatch(text)
        if not is_spec or len(shape) > _MOST_DIMENSIONS:
            raise ValueError
        dtype = np.dtype(text)
        fits = all(type(length) is int and 0 <= length < 1 << 62 for length in shape)
        if not fits or math.prod(shape) * dtype.itemsize > largest:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ValueError(f"an array of {str(entry)[:80]}") from error
    return name, dtype, shape
