"""Keep arrays for later passes: in memory up to a limit, on disk beyond it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
# Other files need space beside the arrays.
_DISK_SHARE = 0.8


class ArrayStore:
    """Store dicts of arrays under integer keys.

    Args:
        folder: folder for arrays that exceed `memory`; it is created if necessary.
        memory: bytes of arrays to keep in memory.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._free_bytes = memory
        self._in_memory: dict[int, Arrays] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._in_memory or key in self._names

    def add(self, key: int, arrays: Arrays) -> None:
        """Store the arrays. They must not be changed afterwards."""
        size = count_bytes(arrays)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._in_memory[key] = arrays
            return
        # One array after the other, as they are: an archive would compute a checksum at each access.
        with self._file(key).open("wb") as file:
            for array in arrays.values():
                np.save(file, array, allow_pickle=False)
        self._names[key] = tuple(arrays)

    def get(self, key: int) -> Arrays:
        """Return the arrays under `key`, which must exist."""
        if key in self._in_memory:
            return self._in_memory[key]
        with self._file(key).open("rb") as file:
            return {name: np.load(file, allow_pickle=False) for name in self._names[key]}

    def _file(self, key: int) -> Path:
        return self._folder / f"{key}.npy"


def count_bytes(arrays: Arrays) -> int:
    """Return the size of the arrays."""
    return sum(array.nbytes for array in arrays.values())


def count_free_bytes(folder: Path) -> int:
    """Return the number of bytes of arrays that may be written to the disk of `folder`."""
    return int(_DISK_SHARE * shutil.disk_usage(folder).free)
