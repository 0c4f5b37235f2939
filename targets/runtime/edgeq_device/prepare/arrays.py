"""Read arrays from numpy's file formats. The files are untrusted, so nothing in them is unpickled."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Tuple

import numpy as np

from edgeq_device.errors import DataError
from edgeq_device.system.budget import VARIABLE, read_largest_sample
from edgeq_device.system.files import open_file

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
