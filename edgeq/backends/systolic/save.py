"""Programs as files: one .npz without pickled objects, JSON for everything but arrays."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from edgeq_device.arrays import write_npz
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from edgeq.backends.systolic import program as ir
from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.program import Pool, Program, Step, Tensor, Tile
from edgeq.errors import BundleError
from edgeq.ownership import is_plain

FORMAT = 1
MAX_BYTES = 2**31
_STEPS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ir.Quantize,
        ir.Dequantize,
        ir.Conv,
        ir.Fc,
        ir.ResidualAdd,
        ir.MaxPool,
        ir.AveragePool,
        ir.Clamp,
        ir.Concat,
        ir.Rearrange,
        ir.Float,
    )
}
_MAIN = "program"
_DAMAGED = "The file is damaged or was made by another version; build it again"


def save_program(program: Program, path: Path) -> None:
    """Write `program`; the same program gives the same bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    steps = [_plain_step(step, number, arrays) for number, step in enumerate(program.steps)]
    document = {
        "format": FORMAT,
        "name": program.name,
        "array": dataclasses.asdict(program.array),
        "inputs": program.inputs,
        "outputs": program.outputs,
        "tensors": [dataclasses.asdict(tensor) for tensor in program.tensors.values()],
        "steps": steps,
        "notes": program.notes,
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8")
    arrays[_MAIN] = np.frombuffer(text, np.uint8)
    with path.open("wb") as stream:
        write_npz(stream, dict(sorted(arrays.items())))


def is_program(path: Path) -> bool:
    """Whether `path` is a file of the form that `save_program` writes."""
    if not is_plain(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return f"{_MAIN}.npy" in archive.namelist()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return False


def belongs_to_program(path: Path) -> bool:
    """Whether `path` is a program, or a model that lies beside the program of the same stem, as `build` leaves them."""
    if path.name.endswith(".program.npz"):
        return is_program(path)
    stem = path.stem.removesuffix(".dialect")
    if path.suffix != ".onnx" or not is_plain(path) or not is_program(path.with_name(f"{stem}.program.npz")):
        return False
    try:
        # Not `load_model`: the dialect has an operator that ONNX does not know.
        return bool(onnx.load_model(path, load_external_data=False).graph.node)
    except (DecodeError, ValueError):
        return False


def load_program(path: Path) -> Program:
    """The inverse of `save_program`.

    Raises:
        BundleError: no such file, or not a program of this format.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BundleError(f"{path} is larger than any program", _DAMAGED)
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
                raise BundleError(f"{path} unpacks to more than any program", _DAMAGED)
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        document = json.loads(arrays.pop(_MAIN).tobytes().decode("utf-8"))
        if document["format"] != FORMAT:
            raise BundleError(f"{path} is a program of format {document['format']!r}, not {FORMAT}", _DAMAGED)
        tensors = [_tensor(entry) for entry in document["tensors"]]
        return Program(
            document["name"],
            ArrayConfig(**document["array"]),
            tuple(document["inputs"]),
            tuple(document["outputs"]),
            {tensor.name: tensor for tensor in tensors},
            tuple(_step(entry, arrays) for entry in document["steps"]),
            tuple(document["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise BundleError(f"{path} holds no program ({type(error).__name__}: {error})", _DAMAGED) from error


def _plain_step(step: Step, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": type(step).__name__}
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        if isinstance(value, np.ndarray):
            key = f"{number:05d}.{field.name}"
            arrays[key] = value
            plain[field.name] = {"array": key}
        elif field.name == "tiles":
            plain[field.name] = [dataclasses.astuple(tile) for tile in value]
        elif isinstance(value, Pool):
            plain[field.name] = dataclasses.astuple(value)
        else:
            plain[field.name] = dict(value) if field.name == "reasons" else value
    return plain


def _step(plain: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Step:
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if name == "kind":
            continue
        if isinstance(value, dict) and set(value) == {"array"}:
            values[name] = arrays[value["array"]]
            if name == "model":
                values[name] = values[name].tobytes()
        elif name == "tiles":
            values[name] = tuple(Tile(*tile) for tile in value)
        elif name == "pool":
            values[name] = Pool(*value) if value is not None else None
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    step: Step = _STEPS[plain["kind"]](**values)
    return step


def _tensor(entry: dict[str, Any]) -> Tensor:
    channels = entry.pop("channels")
    shape = tuple(entry.pop("shape"))
    return Tensor(shape=shape, channels=None if channels is None else tuple(channels), **entry)
