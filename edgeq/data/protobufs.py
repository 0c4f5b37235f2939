"""The readers for ONNX TensorProto files: test_data_set_N/input_M.pb cases, and one stacked .pb."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from edgeq.data.arrays import damage
from edgeq.data.fit import Plan, plan_prepared
from edgeq.data.records import Hash, Record, Rows, update_with_file
from edgeq.data.state import Array
from edgeq.errors import DataError
from edgeq.records import is_longer
from edgeq.signature import Signature

MAX_BYTES = 1 << 30
CASE = re.compile(r"test_data_set_(\d+)")
INPUT = re.compile(r"input_(\d+)\.pb")


def read_tensor(path: Path) -> tuple[str, Array]:
    """The name and values of a TensorProto file.

    Raises:
        DataError: not a TensorProto, damaged, too large, or with values in another file.
    """
    with damage(path):
        if is_longer(path, MAX_BYTES):
            raise DataError(f"{path} is larger than {MAX_BYTES} bytes", "Split it into several cases")
        data = path.read_bytes()
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(data)
    except DecodeError as error:
        raise DataError(f"{path} is not a TensorProto", "It is damaged, truncated or of another kind") from error
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise DataError(f"{path} keeps its values in another file", "Store the values inside")
    if tensor.data_type == onnx.TensorProto.UNDEFINED or any(size < 0 for size in tensor.dims):
        raise DataError(f"{path} is not a TensorProto of known dtype and shape", "Only tensors are read")
    if math.prod(tensor.dims) > 8 * len(data):  # at most eight elements (of one bit) a stored byte
        raise DataError(f"{path} claims shape {list(tensor.dims)} but holds {len(data)} bytes", "The file is damaged")
    try:
        return tensor.name, np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read: {text}", "The file is damaged") from error


@dataclass(frozen=True)
class Cases:
    """Folders of input_0.pb …; one record each."""

    root: Path
    cases: tuple[tuple[Path, ...], ...]
    signature: Signature
    prepared: bool
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"  # a test case is a complete sample of any batch size

    def __len__(self) -> int:
        return len(self.cases)

    def read(self, indices: range) -> Iterator[Record]:
        """The tensors of each test case, by input name."""
        inputs = [spec.name for spec in self.signature.inputs]
        for index in indices:
            files = self.cases[index]
            tensors = [read_tensor(path) for path in files]
            named = sorted(name for name, _ in tensors) == sorted(inputs)
            raw = {name if named else inputs[i]: array for i, (name, array) in enumerate(tensors)}
            folder = files[0].parent
            yield Record(str(folder), raw, None, {"file": folder.name})

    def update(self, digest: Hash, indices: range) -> None:
        """Hash path and bytes of every file of the test cases."""
        for index in indices:
            for path in self.cases[index]:
                update_with_file(digest, path, path.relative_to(self.root).as_posix())


def find_cases(root: Path) -> tuple[Path, ...]:
    """The case folders: `root` itself if it holds input_0.pb, else its test_data_set_N in the order of N."""
    if (root / "input_0.pb").is_file():
        return (root,)
    found = [(int(match[1]), path) for path in root.iterdir() if (match := CASE.fullmatch(path.name)) and path.is_dir()]
    return tuple(path for _, path in sorted(found))


def open_cases(root: Path, folders: tuple[Path, ...], signature: Signature, *, prepared: bool) -> Cases:
    """Check that every case has one input_M.pb an input (M counts the model's inputs)."""
    count = len(signature.inputs)
    cases = []
    for folder in folders:
        numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := INPUT.fullmatch(path.name)))
        if numbers != list(range(count)):
            raise DataError(
                f"{folder} holds {len(numbers)} inputs ({', '.join(f'input_{n}.pb' for n in numbers) or 'none'}), "
                f"the model takes {count} ({', '.join(spec.name for spec in signature.inputs)})",
                "Store input_0.pb" + (f" to input_{count - 1}.pb" if count > 1 else ""),
            )
        cases.append(tuple(folder / f"input_{number}.pb" for number in numbers))
    return Cases(root, tuple(cases), signature, prepared)


@dataclass(frozen=True)
class Stacked:
    """One TensorProto file that holds many samples of a one-input model."""

    path: Path
    array: Array
    target: str
    plan: Plan
    prepared: bool
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> Rows:
        """ "one" where each slice is one row of the batch, else "exact"."""
        return "one" if self.plan.one_row else "exact"

    def __len__(self) -> int:
        return self.plan.count

    def read(self, indices: range) -> Iterator[Record]:
        """Slices of the first axis, with or without that axis as the plan has it."""
        for index in indices:
            if self.plan.kind == "rows":
                value = self.array[index : index + 1]
            else:
                value = self.array[index] if self.plan.kind == "items" else self.array
            yield Record(f"{self.path}[{index}]", {self.target: value}, None, {"file": self.path.name, "index": index})

    def update(self, digest: Hash, indices: range) -> None:
        """Hash the file, and which slices of it are taken."""
        update_with_file(digest, self.path, self.path.name)
        digest.update(repr(indices).encode())


def open_stacked(
    path: Path, signature: Signature, layout: str | None, stack: bool | None, *, prepared: bool
) -> Stacked:
    """Read the file and decide how it splits: as `plan_prepared`, or for raw data by the axes of `layout`.

    One flat axis of exactly one sample's values is accepted too, as older tools wrote it.
    """
    if len(signature.inputs) != 1:
        raise DataError(
            f"{path} is one tensor, the model takes {len(signature.inputs)} inputs", "Store cases in folders"
        )
    spec = signature.inputs[0]
    _, array = read_tensor(path)
    if not prepared and layout is not None:
        if array.ndim <= len(layout):
            return Stacked(path, array, spec.name, Plan("whole", 1, True), prepared)
        array = array.reshape((-1, *array.shape[array.ndim - len(layout) :]))
        if array.size == 0:
            raise DataError(f"{path} holds no samples", "Leave the file out")
        return Stacked(path, array, spec.name, Plan("items", len(array), True), prepared)
    if array.ndim == 1 and spec.shape is not None and len(spec.shape) > 1:
        sizes: list[Any] = [1 if axis == 0 and not isinstance(n, int) else n for axis, n in enumerate(spec.shape)]
        if all(isinstance(n, int) for n in sizes) and math.prod(sizes) == array.size:
            array = array.reshape(sizes)
    shapes: Mapping[str, tuple[int, ...]] = {spec.name: array.shape}
    return Stacked(path, array, spec.name, plan_prepared(shapes, signature, str(path), stack), prepared)
