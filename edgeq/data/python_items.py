"""The reader for Python objects: lists, iterators, functions that give iterators, and objects with get_next.

What can be read only once is written to a temporary file that grows on disk, so that samples can be read again and
memory stays flat.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from edgeq.data.fit import first_input
from edgeq.data.records import Hash, Record, Rows
from edgeq.data.state import Array
from edgeq.errors import DataError
from edgeq.signature import Signature

_IN_MEMORY = 64 << 20


@dataclass(frozen=True)
class PythonItems:
    """Records of items that `again` gives, as often as it is called, always the same."""

    again: Callable[[], Iterator[Any]]
    count: int
    signature: Signature
    target: str
    prepared: bool
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"

    def __len__(self) -> int:
        return self.count

    def read(self, indices: range) -> Iterator[Record]:
        for index, item in enumerate(self.again()):
            if index >= indices.stop:
                return
            if index in indices:
                raw, label = split_item(item, self.signature, self.target, f"item {index}")
                yield Record(f"item {index}", raw, label, {"index": index})

    def update(self, digest: Hash, indices: range) -> None:
        for record in self.read(indices):
            for name, value in sorted(record.raw.items()):
                if isinstance(value, np.ndarray):
                    digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
                    digest.update(np.ascontiguousarray(value).tobytes())
                else:
                    digest.update(f"{name}\0{value!r}\0".encode())


def open_python(source: Any, signature: Signature, *, prepared: bool, wanted: str | None) -> PythonItems:
    """A reader for `source`.

    Args:
        source: a sequence; an iterable that can be iterated again; an iterator or generator (read once, kept in a
            temporary file); a function that gives a fresh iterator at each call; or an object whose `get_next()`
            gives a dict or None, as ONNX Runtime's CalibrationDataReader.
        wanted: the model input that single arrays feed, where it has several.
    """
    target = first_input(signature, wanted)
    again: Callable[[], Iterator[Any]]
    if callable(getattr(source, "get_next", None)):
        again, count = _spool(iter(source.get_next, None), signature, target)
    elif isinstance(source, Sequence) and not isinstance(source, str | bytes):
        again, count = lambda: iter(source), len(source)
    elif callable(source):
        again = lambda: iter(source())  # noqa: E731
        count = sum(1 for _ in again())
    elif isinstance(source, Iterator):
        again, count = _spool(source, signature, target)
    elif isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        again = lambda: iter(source)  # noqa: E731
        count = sum(1 for _ in again())
    else:
        raise DataError(f"{type(source).__name__} is not data", "Give a path, an iterable of samples, or a function")
    return PythonItems(again, count, signature, target, prepared)


def split_item(item: Any, signature: Signature, target: str, where: str) -> tuple[dict[str, Any], Any]:
    """Inputs and label of one item: a dict of inputs, an array, a tuple of one array an input, or (inputs, label).

    Raises:
        DataError: a tuple that does not match the model's inputs.
    """
    names = [spec.name for spec in signature.inputs]
    if isinstance(item, Mapping):
        return {str(name): _array(value) for name, value in item.items()}, None
    if isinstance(item, tuple) and len(item) == 2 and (isinstance(item[0], Mapping | tuple) or len(names) != 2):
        inputs, _ = split_item(item[0], signature, target, where)
        return inputs, item[1].item() if isinstance(item[1], np.generic) else item[1]
    if isinstance(item, tuple) and len(item) != 1:
        if len(item) != len(names):
            raise DataError(f"{where} has {len(item)} arrays, the model takes {len(names)}", f"Give {', '.join(names)}")
        return {name: _array(value) for name, value in zip(names, item, strict=True)}, None
    return {target: _array(item[0] if isinstance(item, tuple) else item)}, None


def _array(value: Any) -> Any:
    return value if isinstance(value, str) else np.asarray(value)


def _spool(items: Iterator[Any], signature: Signature, target: str) -> tuple[Callable[[], Iterator[Any]], int]:
    # The closure below keeps the file open as long as the samples live; it has no name on disk to clean up.
    file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    kept: list[tuple[list[tuple[str, int]], dict[str, str], Any]] = []
    for index, item in enumerate(items):
        inputs, label = split_item(item, signature, target, f"item {index}")
        arrays, texts = [], {}
        for name, value in inputs.items():
            if isinstance(value, str):
                texts[name] = value
            else:
                arrays.append((name, file.tell()))
                _write(file, value, f"item {index}")
        kept.append((arrays, texts, label))

    def again() -> Iterator[Any]:
        for arrays, texts, label in kept:
            inputs: dict[str, Any] = dict(texts)
            for name, position in arrays:
                file.seek(position)
                inputs[name] = npy.read_array(file, allow_pickle=False)
            yield (inputs, label)

    return again, len(kept)


def _write(file: IO[bytes], array: Array, where: str) -> None:
    if array.dtype.hasobject:
        raise DataError(f"{where} holds Python objects", "Give numeric arrays of one shape")
    buffer = io.BytesIO()
    npy.write_array(buffer, array, allow_pickle=False)
    file.write(buffer.getbuffer())
