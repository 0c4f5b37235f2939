"""Exchange frames of arrays over a pipe.

A frame carries a request or an answer between edgeq and a program that it runs elsewhere. It consists of the length of
a JSON text (4 bytes, little endian), the text, and the bytes of the arrays that the text lists.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from typing import IO, Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.errors import DataError, DeviceError
from edgeq_device.prepare.arrays import MAX_ARRAY_BYTES
from edgeq_device.system.plainjson import MAX_BYTES, parse_json

Arrays = Dict[str, "np.ndarray[Any, Any]"]
_LISTED = "arrays"
# Accept only plain numbers, texts of a fixed length and raw bytes. numpy would also accept structures and more.
_DTYPE = re.compile(r"[<>|=]?[biufcSUV]\d{1,6}")
# numpy's own limit since version 2.
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
    # The other side ended between two frames.
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    # Before reading, because an untrusted guest may announce gigabytes.
    if size > limits.text:
        raise ValueError(f"a frame of {size} bytes")
    try:
        # File names in a request need not be text.
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
