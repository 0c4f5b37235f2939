"""Save programs as files: one .npz without pickled objects. Everything but the arrays is JSON."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
from edgeq_device.errors import DeviceError
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.prepare.npz import write_npz
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.program import Pool, Program, Step, Tensor, Tile
from edgeq.data.arrays import DAMAGE
from edgeq.errors import BundleError
from edgeq.util.marker import is_plain
from edgeq.util.records import parse, plain

SUFFIX = ".program.npz"
# Raised when older files can no longer be read.
FORMAT = 1
# Only these classes are made from a file, whatever it names.
_STEPS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Step)}
_MAIN = "program"
_DAMAGED = "The file is damaged or was made by another version; build it again"


@dataclass(frozen=True)
class _Document:
    """Hold everything in a program but its arrays.

    Attributes:
        steps: `kind` and the fields of each step; arrays and bytes are replaced by {"array": name}.
    """

    format: int
    name: str
    array: ArrayConfig
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    steps: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]


def save_program(program: Program, path: Path) -> None:
    """Write `program`. The same program always gives the same bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    document = _Document(
        FORMAT,
        program.name,
        program.array,
        program.inputs,
        program.outputs,
        tuple(program.tensors.values()),
        tuple(_step_record(step, number, arrays) for number, step in enumerate(program.steps)),
        program.notes,
    )
    text = json.dumps(plain(document), ensure_ascii=False, allow_nan=False).encode("utf-8")
    # Text as an array of bytes needs no pickled objects, which could run code.
    arrays[_MAIN] = np.frombuffer(text, np.uint8)
    with path.open("wb") as stream:
        # Sorted names make the bytes reproducible.
        write_npz(stream, dict(sorted(arrays.items())))


def is_program(path: Path) -> bool:
    """Return whether `path` is a file in the format of `save_program`."""
    if not is_plain(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return f"{_MAIN}.npy" in archive.namelist()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return False


def belongs_to_program(path: Path) -> bool:
    """Return whether `path` is a program, or a model next to a program with the same stem, as `build` writes them."""
    if path.name.endswith(".program.npz"):
        return is_program(path)
    stem = path.stem.removesuffix(".dialect")
    if path.suffix != ".onnx" or not is_plain(path) or not is_program(path.with_name(f"{stem}{SUFFIX}")):
        return False
    try:
        # `load_model` would refuse a dialect file, because ONNX does not know one of the dialect's operators.
        return bool(onnx.load_model(path, load_external_data=False).graph.node)
    except (DecodeError, ValueError):
        return False


def load_program(path: Path) -> Program:
    """Read a program that `save_program` wrote.

    Raises:
        BundleError: the file does not exist, or is not a program in this format.
    """
    try:
        arrays = read_arrays(path)
        document = json.loads(arrays.pop(_MAIN).tobytes().decode("utf-8"))
        if document["format"] != FORMAT:
            raise BundleError(f"{path} is a program of format {document['format']!r}, not {FORMAT}", _DAMAGED)
        content = parse(document, _Document, path, BundleError)
        return Program(
            content.name,
            content.array,
            content.inputs,
            content.outputs,
            {tensor.name: tensor for tensor in content.tensors},
            tuple(_step(entry, arrays) for entry in content.steps),
            content.notes,
        )
    except (*DAMAGE, DeviceError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} contains no program ({type(error).__name__}: {error})", _DAMAGED) from error


def _step_record(step: Step, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": type(step).__name__}
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        if isinstance(value, bytes):
            value = np.frombuffer(value, np.uint8)
        if isinstance(value, np.ndarray):
            key = f"{number:05d}.{field.name}"
            arrays[key] = value
            record[field.name] = {"array": key}
        elif field.name == "tiles":
            record[field.name] = [dataclasses.astuple(tile) for tile in value]
        elif isinstance(value, Pool):
            record[field.name] = dataclasses.astuple(value)
        else:
            record[field.name] = dict(value) if field.name == "reasons" else value
    return record


def _step(entry: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Step:
    values: dict[str, Any] = {}
    for name, value in entry.items():
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
    step: Step = _STEPS[entry["kind"]](**values)
    return step
