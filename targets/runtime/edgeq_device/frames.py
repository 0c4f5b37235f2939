"""Requests and answers with arrays over a pipe: between edgeq and the program that it runs in an emulated machine.

A frame is the length of a JSON text (4 bytes, little endian), the text, and the bytes of the arrays that it lists.
"""

from __future__ import annotations

import json
import math
import struct
from typing import IO, Any, Dict, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.arrays import MAX_ARRAY_BYTES
from edgeq_device.errors import DataError
from edgeq_device.plainjson import MAX_BYTES

_LISTED = "arrays"


def read_frame(stream: IO[bytes]) -> Optional[Tuple[Dict[str, Any], Dict[str, "np.ndarray[Any, Any]"]]]:
    """The next frame: its content and its arrays by name; None at the end of the stream.

    Raises:
        ValueError: it is no frame, or larger than 16 MiB of JSON or 4 GiB an array.
    """
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = struct.unpack("<I", head)[0]
    if size > MAX_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    content = json.loads(stream.read(size))
    arrays = {}
    for name, text, shape in content.pop(_LISTED):
        dtype = np.dtype(text)
        count = math.prod(shape)
        if dtype.hasobject or min(shape, default=0) < 0 or count * dtype.itemsize > MAX_ARRAY_BYTES:
            raise ValueError(f"an array of {text}{shape}")
        arrays[name] = np.frombuffer(stream.read(count * dtype.itemsize), dtype, count).reshape(shape)
    return content, arrays


def write_frame(stream: IO[bytes], content: Mapping[str, Any], arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Write one frame.

    Raises:
        DataError: an array of Python objects (texts), which has no bytes of its own.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise DataError(f"tensor {name!r} holds texts, which cannot be sent to an emulated machine")
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**content, _LISTED: listed}).encode()
    stream.write(struct.pack("<I", len(text)) + text)
    for array in arrays.values():
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()
