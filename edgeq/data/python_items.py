"""Read Python objects: lists, iterators, functions that return iterators, and objects with get_next.

Items that can be read only once are written to a temporary file on disk. So they can be read again, and memory use
stays constant.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from edgeq.data.input_names import choose_input
from edgeq.data.records import Hash, Record, Rows, update_with_file
from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.signature import Signature

# Up to 64 MiB, items that can be read only once stay in memory. More goes to a file.
_IN_MEMORY = 64 << 20


@dataclass(frozen=True)
class PythonItems:
    """Read Python items as records. Each call of `iterate` returns a new iterator over the same items.

    Attributes:
        files: whether text items are paths of files.
    """

    iterate: Callable[[], Iterator[Any]]
    count: int
    signature: Signature
    target: str
    prepared: bool
    files: bool = False
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"

    def __len__(self) -> int:
        return self.count

    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the items at `indices`. Each call uses a new iterator.

        Raises:
            DataError: there are fewer items than in the first pass.
        """
        index, last_index = -1, indices[-1] if indices else -1
        # Membership in a range needs no memory, and a set is needed only for a list of numbers.
        selection = indices if isinstance(indices, range) else frozenset(indices)
        for index, item in enumerate(self.iterate()):
            if index > last_index:
                return
            if index in selection:
                raw, label = split_item(item, self.signature, self.target, f"item {index}")
                if self.files:
                    raw = {name: Path(value) if isinstance(value, str) else value for name, value in raw.items()}
                path = next((value for value in raw.values() if isinstance(value, Path)), None)
                place = {} if path is None else {"file": path.name, "path": path.as_posix()}
                name = f"item {index}" if path is None else str(path)
                if isinstance(item, Sample):
                    name, place = item.name, {**item.context}
                yield Record(name, raw, label, {"index": index, **place})
        if indices and index < indices[-1]:
            raise DataError(
                f"the data gave {self.count} items at first, but {index + 1} when read again",
                "Give a list, or a function that makes a new iterator at each call",
            )

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Hash the names, dtypes, shapes and bytes of every item at `indices`."""
        for record in self.read_records(indices):
            for name, value in sorted(record.raw.items()):
                if isinstance(value, np.ndarray):
                    digest.update(f"{name}\0{value.dtype.str}\0{value.shape}\0".encode())
                    digest.update(np.ascontiguousarray(value).tobytes())
                elif isinstance(value, Path):
                    update_with_file(digest, value, value.name)
                else:
                    digest.update(f"{name}\0{value!r}\0".encode())


def open_python(
    source: Any, signature: Signature, *, prepared: bool, input_name: str | None, files: bool = False
) -> PythonItems:
    """Return a reader for `source`.

    Args:
        source: a sequence; an iterable that can be iterated again; an iterator or generator, which is read once and
            kept in a temporary file; a function that returns a new iterator at each call; or an object whose
            `get_next()` returns a dict or None, such as ONNX Runtime's CalibrationDataReader.
        input_name: the model input that single arrays feed, if the model has several.
        files: whether text items are paths of files.

    Raises:
        DataError: `source` is none of these, or its `get_next()` was read to the end and it has no `rewind()`.
    """
    target = choose_input(signature, input_name)
    iterate: Callable[[], Iterator[Any]]
    if isinstance(source, type):
        raise DataError(f"the class {source.__name__} is not data", f"Give an object of it, {source.__name__}(...)")
    if callable(getattr(source, "get_next", None)):
        iterate, count = _spool(drain_reader(source), signature, target)
        if not count and callable(getattr(source, "rewind", None)):  # a script may already have read it
            source.rewind()
            iterate, count = _spool(drain_reader(source), signature, target)
        if not count:
            raise DataError(
                f"{type(source).__name__}.get_next() gives no samples", "If it was read before, make a new one"
            )
    # A sequence has a length and can be read any number of times, so nothing is copied.
    elif isinstance(source, Sequence) and not isinstance(source, str | bytes):
        iterate, count = lambda: iter(source), len(source)
    elif callable(source):
        iterate = lambda: _call_source(source)  # noqa: E731
        count = sum(1 for _ in iterate())
    elif isinstance(source, Iterator):
        iterate, count = _spool(source, signature, target)
        if not count:
            raise DataError(
                f"Python {type(source).__name__} holds no samples",
                "If it was read before, make a new one, or give a list",
            )
    elif isinstance(source, Iterable) and not isinstance(source, str | bytes | Mapping):
        iterate = lambda: iter(source)  # noqa: E731
        count = sum(1 for _ in iterate())
    else:
        fix = "Give a path, an iterable of samples, or a function"
        if isinstance(source, Mapping):
            fix = f"{fix}; for one sample, give a list: [sample]"
        raise DataError(f"{type(source).__name__} is not data", fix)
    return PythonItems(iterate, count, signature, target, prepared, files)


def drain_reader(reader: Any) -> Iterator[Any]:
    """Yield the results of `reader.get_next()` until it returns None or raises StopIteration."""
    while True:
        try:
            item = reader.get_next()
        except StopIteration:
            return
        if item is None:
            return
        yield item


def split_item(item: Any, signature: Signature, target: str, location: str) -> tuple[dict[str, Any], Any]:
    """Return the inputs and the label of one item. The item is a `Sample`, a dict of inputs, an array, a tuple or list
    with one array per input, or one of these with a label: (inputs, label).

    Raises:
        DataError: a tuple does not match the model's inputs.
    """
    names = [spec.name for spec in signature.inputs]
    if isinstance(item, Sample):
        return dict(item.inputs), item.label
    if isinstance(item, Mapping):
        return {str(name): _to_array(value, location) for name, value in item.items()}, None
    if isinstance(item, list) and _is_several(item, len(names)):
        item = tuple(item)
    # Two arrays are two inputs if the model has two. Otherwise the second one is the label.
    if isinstance(item, tuple) and len(item) == 2 and (isinstance(item[0], Mapping | tuple) or len(names) != 2):
        inputs, _ = split_item(item[0], signature, target, location)
        return inputs, item[1].item() if isinstance(item[1], np.generic) else item[1]
    if isinstance(item, tuple) and len(item) != 1:
        if len(item) != len(names):
            raise DataError(
                f"{location} has {len(item)} arrays, the model takes {len(names)}", f"Give {', '.join(names)}"
            )
        return {name: _to_array(value, location) for name, value in zip(names, item, strict=True)}, None
    return {target: _to_array(item[0] if isinstance(item, tuple) else item, location)}, None


def _is_several(item: list[Any], inputs: int) -> bool:
    """Return whether a list means several arrays instead of one array. PyTorch's loaders give such lists for several
    inputs, or for arrays of different shapes.
    """
    first_value = item[0] if item else None
    if not isinstance(first_value, Mapping | tuple) and not hasattr(first_value, "shape"):
        return False
    if all(isinstance(value, Mapping) for value in item):  # the list contains samples, not arrays
        return False
    return inputs > 1 or isinstance(first_value, Mapping | tuple) or len({np.shape(value) for value in item}) > 1


def _to_array(value: Any, location: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return Path(value)
    try:
        return np.asarray(value)
    # RuntimeError is raised for a PyTorch tensor that has a gradient
    except (ValueError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"{location} is not an array ({text})", "Give numbers of one shape") from error


def _call_source(function: Callable[[], Any]) -> Iterator[Any]:
    items = function()
    if not isinstance(items, Iterable):
        raise DataError(f"the function of the data gives {type(items).__name__}", "Return or yield samples")
    return iter(items)


class _Spool:
    """Hold items that are written once and read many times. The temporary file has no name and disappears with this
    object.
    """

    def __init__(self) -> None:
        self.file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  # closed by finalize
        self.entries: list[tuple[list[tuple[str, int]], dict[str, str | Path], Any]] = []
        self.samples: dict[int, Sample] = {}
        weakref.finalize(self, self.file.close)

    def add(self, inputs: Mapping[str, Any], label: Any, location: str) -> None:
        """Write one item's arrays to the temporary file. Texts, paths and the label stay in memory.

        Raises:
            DataError: an array contains Python objects.
        """
        arrays: list[tuple[str, int]] = []
        texts: dict[str, str | Path] = {}
        for name, value in inputs.items():
            if isinstance(value, str | Path):
                texts[name] = value
                continue
            if value.dtype.hasobject:
                raise DataError(f"{location} holds Python objects", "Give numeric arrays of one shape")
            arrays.append((name, self.file.tell()))
            npy.write_array(self.file, value, allow_pickle=False)
        self.entries.append((arrays, texts, label))

    def iterate(self) -> Iterator[Any]:
        """Yield the added items in their order, with arrays read back from the file."""
        for number, (arrays, texts, label) in enumerate(self.entries):
            inputs: dict[str, Any] = dict(texts)
            for name, position in arrays:
                self.file.seek(position)
                inputs[name] = npy.read_array(self.file, allow_pickle=False)
            sample = self.samples.get(number)
            yield (inputs, label) if sample is None else replace(sample, inputs=inputs)


def _spool(items: Iterator[Any], signature: Signature, target: str) -> tuple[Callable[[], Iterator[Any]], int]:
    spool = _Spool()
    for index, item in enumerate(items):
        spool.add(*split_item(item, signature, target, f"item {index}"), f"item {index}")
        if isinstance(item, Sample):
            spool.samples[index] = replace(item, inputs={})
    return spool.iterate, len(spool.entries)
