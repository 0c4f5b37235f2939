"""Write the weights of a model to data files next to it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import IO

import onnx

from edgeq.errors import UsageError
from edgeq.model.tensors import external_span, is_external, iter_graphs, tensor_bytes

# Alignment in bytes. Each weight begins at a page boundary, so a runtime can map it into memory.
_ALIGNMENT = 4096
_SAFE = frozenset(string.ascii_letters + string.digits + "_-.")
_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")


def save_external(
    model: onnx.ModelProto, path: Path, *, origin: Path, location: str | None = None, threshold: int = 1024
) -> None:
    """Write a model. Its initializers of at least `threshold` bytes go to data files next to it.

    Args:
        model: the model; it is changed in place to refer to the new files.
        path: the model file. Its folder must not contain any of the files that are written.
        origin: the model file whose folder contains the external data of `model`.
        location: name of one file for all weights. None gives each weight its own file, named after the weight.

    Raises:
        UsageError: `location` is not the name of a file next to the model.
    """
    if location is not None and (location.strip(".") == "" or location == path.name or not set(location) <= _SAFE):
        raise UsageError(
            f"external data location {location!r} is not the name of a file next to the model",
            "Give a plain file name of letters, digits, and _ - .",
        )
    used_names = {path.name.lower()}
    for graph in iter_graphs(model.graph):
        for tensor in graph.initializer:
            if tensor.data_type == onnx.TensorProto.STRING:
                continue
            if tensor_bytes(tensor) >= threshold:
                name = location or _file_name(tensor.name, used_names)
                used_names.add(name.lower())
                # Appended, because one file may hold all weights.
                with (path.parent / name).open("ab") as file:
                    _move(tensor, origin, file, name)
            elif is_external(tensor):
                content = _bytes(tensor, origin)
                _clear(tensor)
                tensor.raw_data = content
    path.write_bytes(model.SerializeToString(deterministic=True))


def _file_name(tensor: str, used_names: set[str]) -> str:
    """Return a file name made from the tensor's name. It differs from all names in `used_names`, even on file systems
    that ignore case.
    """
    stem = "".join(c if c in _SAFE else "_" for c in tensor).strip(".")[:100] or "weight"
    name, number = stem, 1
    while name.lower() in used_names:
        number += 1
        name = f"{stem}.{number}"
    return name


def _move(tensor: onnx.TensorProto, origin: Path, file: IO[bytes], name: str) -> None:
    """Append a tensor's bytes to a file, and let the tensor refer to them."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(_bytes(tensor, origin))
    length = file.tell() - offset
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def _bytes(tensor: onnx.TensorProto, origin: Path) -> bytes:
    """Return the tensor's data in the format of `raw_data`."""
    if is_external(tensor):
        return external_span(tensor, origin).read_bytes()
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    import onnx_ir

    return onnx_ir.serde.deserialize_tensor(tensor).tobytes()


def _clear(tensor: onnx.TensorProto) -> None:
    for field in _FIELDS:
        tensor.ClearField(field)
    tensor.ClearField("data_location")
