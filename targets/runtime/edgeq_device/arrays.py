"""Arrays in .npy and .npz files, without pickle and without believing a header before the bytes are there."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, Dict, Mapping, Optional, Tuple, Union

import numpy as np

from edgeq_device.budget import VARIABLE, largest_sample
from edgeq_device.errors import DataError

MAX_ARRAY_BYTES = 1 << 32


def one_array(value: Any) -> "np.ndarray[Any, Any]":
    """Return what a session gives for one output as an array that an .npz can hold: texts in NumPy's own type, the
    elements of a sequence's parts in a row, and no elements for an optional that is absent."""
    if isinstance(value, list):
        parts = [one_array(part).ravel() for part in value]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)
    array = np.empty(0, np.float32) if value is None else np.asarray(value)
    texts = array.dtype.hasobject and all(isinstance(text, str) for text in array.flat)
    return array.astype(str) if texts else array


def write_npz(
    target: Union[Path, IO[bytes]], arrays: Mapping[str, "np.ndarray[Any, Any]"], level: Optional[int] = None
) -> None:
    """Write a compressed .npz that depends on names and values alone: sorted members, a fixed date.

    Args:
        level: of compression, 0 to 9; None takes zlib's own choice.

    Raises:
        DataError: an array of Python objects, which would need pickle.
    """
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(arrays):
            buffer = io.BytesIO()
            try:
                np.lib.format.write_array(buffer, np.asarray(arrays[name], order="C"), allow_pickle=False)
            except ValueError as error:
                raise DataError(f"{name!r} holds Python objects, which an .npz without pickle cannot") from error
            archive.writestr(plain_entry(f"{name}.npy"), buffer.getvalue(), compresslevel=level)


def plain_entry(name: str) -> zipfile.ZipInfo:
    """A compressed member that depends on its name alone. Its date is the earliest that a zip can hold: a real one
    would make two equal archives differ."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry


def read_arrays(path: Path) -> Dict[str, "np.ndarray[Any, Any]"]:
    """The arrays of an .npz by name, or of an .npy under the name "".

    Raises:
        DataError: missing, not such a file, truncated, pickled objects, or larger than 4 GiB.
    """
    try:
        with path.open("rb") as stream:
            magic = stream.read(2)
            stream.seek(0)
            if magic == b"PK":
                return _read_npz(stream, path)
            size = os.fstat(stream.fileno()).st_size
            return {"": _read_npy(stream, size, str(path))}
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Name an .npy or .npz file") from error


def _read_npz(stream: IO[bytes], path: Path) -> Dict[str, "np.ndarray[Any, Any]"]:
    arrays: Dict[str, "np.ndarray[Any, Any]"] = {}
    try:
        with zipfile.ZipFile(stream) as archive:
            total = sum(info.file_size for info in archive.infolist())
            most = min(MAX_ARRAY_BYTES, path.stat().st_size + largest_sample())
            if total > most:
                raise DataError(f"{path} unpacks to {total} bytes, more than {most}", f"{VARIABLE} sets the limit")
            for info in archive.infolist():
                if not info.filename.endswith(".npy") or info.filename[:-4] in arrays:
                    raise DataError(f"{path}: member {info.filename!r} is not an array, or is there twice")
                with archive.open(info) as member:
                    arrays[info.filename[:-4]] = _read_npy(member, info.file_size, f"{path}: {info.filename}")
    except DataError:
        raise
    except Exception as error:  # a damaged zip raises BadZipFile, zlib.error, EOFError, RuntimeError ...
        raise DataError(f"{path} is not a readable .npz ({error})", "Write it with numpy.savez") from error
    return arrays


def npy_header(stream: IO[bytes]) -> "Tuple[Tuple[int, ...], bool, np.dtype[Any]]":
    """Shape, whether in Fortran's order, and dtype of an .npy stream, which is left at the first value.

    Raises:
        ValueError: whatever is wrong with it.
        OSError: it cannot be read.
    """
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version[0]}.{version[1]} is not supported")
        with warnings.catch_warnings():
            # numpy warns of headers written by Python 2; they are read all the same.
            warnings.simplefilter("ignore", UserWarning)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(stream)
            return np.lib.format.read_array_header_2_0(stream)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python text: TokenError, RecursionError, TypeError ...
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _read_npy(stream: IO[bytes], size: int, where: str) -> "np.ndarray[Any, Any]":
    fix = "Write it with numpy.save(..., allow_pickle=False)"
    if size > MAX_ARRAY_BYTES:
        raise DataError(f"{where} is larger than {MAX_ARRAY_BYTES} bytes")
    try:
        shape, fortran, dtype = npy_header(stream)
    except ValueError as error:
        raise DataError(f"{where} is not an .npy array ({error})", fix) from error
    if dtype.hasobject:
        raise DataError(f"{where} holds pickled Python objects", fix)
    data = stream.read(size)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected or min(shape, default=0) < 0:
        raise DataError(f"{where}: its header promises {expected} bytes, {len(data)} are there", fix)
    try:
        array = np.frombuffer(data, dtype=dtype)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
    except (ValueError, OverflowError) as error:  # elements of no bytes, more dimensions than numpy has
        raise DataError(f"{where} is not an .npy array ({error})", fix) from error
