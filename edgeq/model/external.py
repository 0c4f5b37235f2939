"""Models whose weights lie in files of their own, written tensor by tensor: one weight at a time is in memory."""

from __future__ import annotations

import string
from pathlib import Path
from typing import IO

import onnx

from edgeq.errors import UsageError
from edgeq.model.tensors import external_span, is_external, iter_graphs, tensor_bytes

_ALIGNMENT = 4096
"""Bytes: weights start at pages, so that a runtime can map them."""
_SAFE = frozenset(string.ascii_letters + string.digits + "_-.")
_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")


def save_external(
    model: onnx.ModelProto, path: Path, *, origin: Path, location: str | None = None, threshold: int = 1024
) -> None:
    """Write a model with its initializers of `threshold` bytes or more in data files beside it.

    Args:
        model: changed in place: afterwards it refers to the new files.
        path: the model file, in a folder that holds no file of the names that are written.
        origin: model file whose external tensors `model` has.
        location: name of the one file for all weights; None gives each its own, named after it.

    Raises:
        UsageError: `location` is not the name of a file beside the model.
    """
    if location is not None and (location.strip(".") == "" or location == path.name or not set(location) <= _SAFE):
        raise UsageError(
            f"external data location {location!r} is not the name of a file beside the model",
            "Give a plain file name of letters, digits, and _ - .",
        )
    taken = {path.name.lower()}
    for graph in iter_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING:
                continue
            if tensor_bytes(tensor) >= threshold:
                name = location or _own_name(tensor.name, taken)
                taken.add(name.lower())
                with (path.parent / name).open("ab") as file:
                    _move(tensor, origin, file, name)
            elif is_external(tensor):
                content = _bytes(tensor, origin)
                _clear(tensor)
                tensor.raw_data = content
    path.write_bytes(model.SerializeToString(deterministic=True))


def _own_name(tensor: str, taken: set[str]) -> str:
    """A file name made of the tensor's, unique among `taken`, also on file systems that ignore case."""
    stem = "".join(c if c in _SAFE else "_" for c in tensor).strip(".")[:100] or "weight"
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}.{number}"
    return name


def _move(tensor: onnx.TensorProto, origin: Path, file: IO[bytes], name: str) -> None:
    """Append a tensor's bytes to a file, and let it refer to them."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(_bytes(tensor, origin))
    length = file.tell() - offset
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _bytes(tensor: onnx.TensorProto, origin: Path) -> bytes:
    """The tensor as `raw_data` would hold it."""
    if is_external(tensor):
        return external_span(tensor, origin).read()
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    import onnx_ir

    return onnx_ir.serde.deserialize_tensor(tensor).tobytes()


def _clear(tensor: onnx.TensorProto) -> None:
    for field in _FIELDS:
        tensor.ClearField(field)
    tensor.ClearField("data_location")
