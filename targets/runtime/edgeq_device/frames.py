"""Requests and answers with arrays over a pipe: between edgeq and the program that it runs in an emulated machine.

A frame is the length of a JSON text (4 bytes, little endian), the text, and the bytes of the arrays that it lists.
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any, Dict, Mapping, Optional, Tuple

import numpy as np

from edgeq_device.errors import DataError

_LISTED = "arrays"


def read_frame(stream: IO[bytes]) -> Optional[Tuple[Dict[str, Any], Dict[str, "np.ndarray[Any, Any]"]]]:
    """The next frame: its content and its arrays by name; None at the end of the stream."""
    size = stream.read(4)
    if len(size) < 4:
        return None
    content = json.loads(stream.read(struct.unpack("<I", size)[0]))
    arrays = {}
    for name, text, shape in content.pop(_LISTED):
        dtype = np.dtype(text)
        count = int(np.prod(shape, dtype=np.int64))
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
