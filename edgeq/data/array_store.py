"""Store dicts of arrays: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray[Any, Any]]
# Other files need space beside the arrays.
_DISK_SHARE = 0.8


class ArrayStore:
    """Store dicts of arrays under integer keys.

    Args:
        folder: folder for arrays that exceed `memory`; it is created when they do. None stores everything in memory.
        memory: bytes of arrays to store in memory.
        disk: bytes of arrays to store on disk. What exceeds them is not stored.
    """

    def __init__(self, folder: Path | None = None, memory: float = math.inf, disk: float = math.inf) -> None:
        self._folder = folder
        self._free_bytes, self._free_disk = memory, disk
        self._in_memory: dict[int, Arrays] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._in_memory or (self._folder is not None and self._file(key).exists())

    def add(self, key: int, arrays: Arrays) -> None:
        """Store the arrays. They must not be changed afterwards."""
        size = count_bytes(arrays)
        # Texts are objects, which have no form on disk without pickle.
        objects = any(array.dtype.hasobject for array in arrays.values())
        if size <= self._free_bytes or self._folder is None or objects:
            self._free_bytes -= size
            self._in_memory[key] = arrays
            return
        if size > self._free_disk:
            return
        self._free_disk -= size
        self._folder.mkdir(parents=True, exist_ok=True)
        # An archive of numpy's would compute checksums, which takes three times as long.
        with self._file(key).open("wb") as file:
            for array in (np.array(list(arrays)), *arrays.values()):
                np.save(file, array, allow_pickle=False)

    def get(self, key: int) -> Arrays:
        """Return the arrays under `key`, which must exist."""
        if key in self._in_memory:
            return self._in_memory[key]
        with self._file(key).open("rb") as file:
            names = np.load(file, allow_pickle=False)
            return {str(name): np.load(file, allow_pickle=False) for name in names}

    def select(self, keys: Sequence[int]) -> ArrayStore:
        """Return a view of this store, in which 0 to n - 1 stand for the n `keys`."""
        return _ArrayView(self, keys)

    def _file(self, key: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.npy"


class _ArrayView(ArrayStore):
    def __init__(self, store: ArrayStore, keys: Sequence[int]) -> None:
        super().__init__()
        self._store, self._keys = store, keys

    def __contains__(self, key: int) -> bool:
        return self._keys[key] in self._store

    def add(self, key: int, arrays: Arrays) -> None:
        self._store.add(self._keys[key], arrays)

    def get(self, key: int) -> Arrays:
        return self._store.get(self._keys[key])


def count_bytes(arrays: Arrays) -> int:
    """Return the size of the arrays."""
    return sum(array.nbytes for array in arrays.values())


def count_free_bytes(folder: Path) -> int:
    """Return the number of bytes of arrays that may be written to `folder`, which need not exist yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return int(_DISK_SHARE * shutil.disk_usage(existing).free)
