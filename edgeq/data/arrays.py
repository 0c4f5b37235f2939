"""Read arrays from .npy, .npz, IDX, gzipped IDX and TensorProto files. If the format allows it, only one slice of the
first axis is in memory at a time.

Before allocating memory, the readers check headers against the size of the file. Pickled objects are refused.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import onnx
from edgeq_device.prepare import arrays
from edgeq_device.system.files import open_file, read_file
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from edgeq.data.images import Array
from edgeq.data.limits import check_size
from edgeq.errors import DataError
from edgeq.util.record_files import is_longer

# Each member of an archive costs a header in memory, and an archive of 1 GB may contain millions of empty ones.
MAX_MEMBERS = 10_000
MAX_BYTES = 1 << 30
"""Largest size of a TensorProto file in bytes."""
# Skipping reads this much at a time, so it needs no more memory than this.
_BLOCK = 1 << 20
IDX_NAME = re.compile(r"[-.]idx\d", re.IGNORECASE)
# The type codes of the format in which MNIST was published. Its numbers are big-endian.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    RuntimeError,  # RuntimeError includes RecursionError
    csv.Error,
)
"""Exceptions that Python's and numpy's readers of archives and arrays raise for a damaged file."""


@dataclass(frozen=True)
class Header:
    """Describe the header of a stored array. `start` is the number of bytes before the array's values."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        """Return the size of all values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Slices(Protocol):
    """Yield the slices of one array along its first axis."""

    def take(self, index: int) -> Array:
        """Return a copy of slice `index` of the first axis."""

    def load_all(self) -> Array:
        """Return all values."""


@contextmanager
def damage(path: Path | str) -> Iterator[None]:
    """Turn the exceptions for damaged files into a DataError with a one-line message that names the file."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path} cannot be read: {error.strerror}", "Check the file and its permissions") from error
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read: {text}", "It is damaged, truncated or of another kind") from error


def is_idx(path: Path) -> bool:
    """Return whether `path` has the name of an IDX file, such as train-images-idx3-ubyte.gz."""
    return IDX_NAME.search(path.name) is not None


def read_tensor(path: Path) -> tuple[str, Array]:
    """Return the name and values of a TensorProto file.

    Raises:
        DataError: the file is not a TensorProto, is damaged or too large, or stores its values in another file.
    """
    with damage(path):
        if is_longer(path, MAX_BYTES):
            raise DataError(f"{path} is larger than {MAX_BYTES} bytes", "Split it into several cases")
        data = read_file(path)
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(data)
    except DecodeError as error:
        raise DataError(f"{path} is not a TensorProto", "It is damaged, truncated or of another kind") from error
    # A path in an untrusted file could name any file of the user.
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise DataError(f"{path} keeps its values in another file", "Store the values inside")
    if tensor.data_type == onnx.TensorProto.UNDEFINED or any(size < 0 for size in tensor.dims):
        raise DataError(f"{path} is not a TensorProto of known dtype and shape", "Only tensors are read")
    if math.prod(tensor.dims) > 8 * len(data):  # a stored byte contains at most eight elements, of one bit each
        raise DataError(f"{path} claims shape {list(tensor.dims)} but holds {len(data)} bytes", "The file is damaged")
    try:
        return tensor.name, np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read: {text}", "The file is damaged") from error


class ArrayFile:
    """Open a file of arrays, as a context manager. A file other than .npz contains only one array, and its key
    is "".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._archive: zipfile.ZipFile | None = None
        self.headers: dict[str, Header] = {}
        self._open: dict[str, IO[bytes]] = {}
        self._tensor: Array | None = None
        try:
            with damage(path):
                self._file_size = path.stat().st_size
                if path.suffix.lower() == ".npz":
                    self._open_archive()
                elif path.suffix.lower() == ".pb":
                    self._tensor = read_tensor(path)[1]
                    self.headers[""] = Header(self._tensor.dtype, self._tensor.shape, False, 0)
                else:
                    with self._stream("") as stream:
                        self.headers[""] = self._read_header(stream, self._file_size)
        # The caller gets no object to close, so the files that are already open are closed here.
        except DataError:
            self._stack.close()
            raise

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def slices(self, key: str, shape: tuple[int, ...] | None = None) -> Slices:
        """Return the slices of the array `key`. If `shape` is given, the array is reshaped to it in C order. The number
        of elements must be the same.
        """
        header = self.headers[key]
        view = replace(header, shape=shape) if shape is not None else header
        check_size(
            math.prod(view.shape[1:]) * view.dtype.itemsize,
            f"{self._location(key)} claims samples of {header.dtype}{list(view.shape[1:])}",
            "The file is damaged, or its first axis does not count samples",
            allowance=self._file_size,
        )
        if self._tensor is not None:
            return _Loaded(self._tensor.reshape(view.shape))
        # In column order, one slice of the first axis is spread over the whole array, so it is read at once.
        if header.fortran and len(header.shape) > 1:
            return _Loaded(self.load(key).reshape(view.shape))
        stream = self._stack.enter_context(self._stream(key))
        return _Streamed(stream, view, self._location(key), self._file_size)

    def load(self, key: str) -> Array:
        """Return the whole array, which must not be larger than a sample may be."""
        header = self.headers[key]
        check_size(
            header.nbytes,
            f"{self._location(key)} must be read as a whole",
            "Store it in C order, or in parts",
            allowance=self._file_size,
        )
        with self._stream(key) as stream:
            # One slice that holds everything lets the same reader serve both cases.
            flat_header = replace(header, shape=(1, math.prod(header.shape)))
            flat = _Streamed(stream, flat_header, self._location(key), self._file_size).take(0)
        return flat.reshape(header.shape, order="F" if header.fortran else "C")

    def read_bytes(self, key: str, start: int, stop: int) -> bytes:
        """Return the values from `start` to `stop` (exclusive) of a one-axis uint8 array. Reading in ascending order is
        cheapest.
        """
        if key not in self._open:
            self._open[key] = self._stack.enter_context(self._stream(key))
        stream = self._open[key]
        with damage(self._location(key)):
            _move(stream, self.headers[key].start + start)
            data = stream.read(stop - start)
        if len(data) != stop - start:
            raise DataError(f"{self._location(key)} ends early", "The file is truncated")
        return data

    def describe(self) -> str:
        """Return a phrase that lists the arrays, for messages."""
        some = [f"{key or 'one array'} {h.dtype}{list(h.shape)}" for key, h in list(self.headers.items())[:8]]
        return ", ".join(some) + (" …" if len(self.headers) > 8 else "")

    def _location(self, key: str) -> str:
        return f"{self.path}[{key}]" if key else str(self.path)

    def _open_archive(self) -> None:
        self._archive = self._stack.enter_context(zipfile.ZipFile(self._stack.enter_context(open_file(self.path))))
        members = [m for m in self._archive.infolist() if m.filename.endswith(".npy")]
        if len(members) > MAX_MEMBERS:
            raise DataError(f"{self.path} holds {len(members)} arrays", f"At most {MAX_MEMBERS} are read")
        for member in members:
            with self._archive.open(member) as stream:
                key = member.filename.removesuffix(".npy")
                self.headers[key] = self._read_header(stream, member.file_size)

    @contextmanager
    def _stream(self, key: str) -> Iterator[IO[bytes]]:
        if self._archive is not None:
            with self._archive.open(f"{key}.npy") as member:
                yield member
        elif is_idx(self.path) and self.path.suffix.lower() == ".gz":
            with open_file(self.path) as file, gzip.open(file) as packed:
                yield packed  # type: ignore[misc]  # GzipFile reads and seeks as any binary stream
        else:
            with open_file(self.path) as file:
                yield file

    def _read_header(self, stream: IO[bytes], size: int) -> Header:
        # A gzip file does not know its unpacked size, so its values are checked only when they are read.
        if is_idx(self.path) and self._archive is None:
            header = _read_idx_header(stream)
            expected_size = size if self.path.suffix.lower() != ".gz" else header.start + header.nbytes
        else:
            header = read_npy_header(stream)
            expected_size = size
        # numpy cannot hold or index a larger array, so its error would not name the file.
        if max(header.nbytes, *header.shape, 0) > sys.maxsize:
            raise ValueError(f"shape {[*header.shape][:16]} is larger than any array")
        if header.dtype.hasobject:
            raise DataError(f"{self.path} holds pickled Python objects, which are never loaded", "Save numeric arrays")
        if header.dtype.kind not in "biuf" + "US":
            raise DataError(f"{self.path} holds an array of {header.dtype}", "Save plain numeric arrays")
        if header.start + header.nbytes != expected_size:
            raise DataError(
                f"{self.path} claims {header.dtype}{list(header.shape)} ({header.nbytes} bytes) "
                f"but holds {max(0, expected_size - header.start)}",
                "The file is damaged or truncated",
            )
        return header


def _move(stream: IO[bytes], position: int) -> None:
    """Move to `position` of a stream.

    Python 3.12.0 to 3.12.8, 3.13.0 and 3.13.1 have a bug with uncompressed members of an archive
    (python/cpython#127847): a forward seek starts from the position at which another member was last read, so later
    reads return wrong values. So this function reads up to the position instead of seeking.
    """
    if not isinstance(stream, zipfile.ZipExtFile):
        stream.seek(position)
        return
    if position < stream.tell():
        stream.seek(0)
    while position > stream.tell() and stream.read(min(position - stream.tell(), _BLOCK)):
        pass


class _Streamed:
    def __init__(self, stream: IO[bytes], header: Header, location: str, file_size: int) -> None:
        self.stream, self.header, self.location, self.file_size = stream, header, location, file_size

    def take(self, index: int) -> Array:
        """Return a copy of slice `index` of the first axis."""
        shape, dtype = self.header.shape[1:], self.header.dtype
        size = math.prod(shape) * dtype.itemsize
        with damage(self.location):
            _move(self.stream, self.header.start + index * size)
            data = self.stream.read(size)
        if len(data) != size:
            raise DataError(f"{self.location} ends in sample {index}", "The file is truncated")
        # bytearray, because users' own preprocessings expect writable arrays
        array = np.frombuffer(bytearray(data), dtype).reshape(shape)
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))

    def load_all(self) -> Array:
        """Return all values."""
        check_size(
            self.header.nbytes,
            f"{self.location} must be read as a whole",
            "Store samples in smaller files",
            allowance=self.file_size,
        )
        flat = replace(self.header, shape=(1, math.prod(self.header.shape)))
        return _Streamed(self.stream, flat, self.location, self.file_size).take(0).reshape(self.header.shape)


class _Loaded:
    def __init__(self, array: Array) -> None:
        self.array = array

    def take(self, index: int) -> Array:
        """Return a copy of slice `index` of the first axis."""
        return np.array(self.array[index])

    def load_all(self) -> Array:
        """Return all values."""
        return self.array


def load_labels(file: ArrayFile, key: str) -> list[Any]:
    """Return a one-axis array as a list of plain Python values."""
    header = file.headers[key]
    # Other axes may have size 1: the values are still one list.
    if math.prod(header.shape) != max(header.shape, default=0):
        raise DataError(f"{file.path}: labels {key} have shape {list(header.shape)}", "Give one label per sample")
    # The limit is low because each label becomes a Python object.
    check_size(64 * math.prod(header.shape), f"{file.path}: labels {key}", "Give one label per sample")
    values: list[Any] = file.load(key).reshape(-1).tolist()
    return values


def read_arrays(path: Path) -> Mapping[str, Header]:
    """Return the header of each array, keyed by the array's key."""
    with ArrayFile(path) as file:
        return file.headers


def read_npy_header(stream: IO[bytes]) -> Header:
    """Return the header of an .npy stream. Afterwards, the stream is at the first value.

    Raises:
        ValueError, OSError: for the same reasons as in `edgeq_device.prepare.arrays.read_npy_header`, and also if a
            size is below 0.
    """
    shape, fortran, dtype = arrays.read_npy_header(stream)
    if any(size < 0 for size in shape):
        raise ValueError(f"negative size in shape {list(shape)}")
    return Header(dtype, tuple(shape), bool(fortran), stream.tell())


def _read_idx_header(stream: IO[bytes]) -> Header:
    zero, kind, rank = struct.unpack(">HBB", stream.read(4))
    if zero != 0 or kind not in _IDX_TYPES or rank == 0:
        raise ValueError("not an IDX file")
    shape = struct.unpack(f">{rank}I", stream.read(4 * rank))
    return Header(np.dtype(_IDX_TYPES[kind]), shape, False, 4 + 4 * rank)
