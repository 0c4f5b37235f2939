"""Samples read once and kept: in memory up to a limit, on disk beyond it, in an order that any prefix stands for all.

Data folders are often sorted by class, so the first tenth would be one class. The order is a shuffle with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.data.samples import Sample, Samples
from edgeq.errors import DataError
from edgeq.progress import SILENT, Progress

MEMORY = 1 << 30
_SEED = 0
_MOST_OF_DISK = 0.8
Arrays = Mapping[str, np.ndarray[Any, Any]]


class ArrayStore:
    """Dicts of arrays under integer keys.

    Args:
        folder: is made; for what exceeds `memory` bytes.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._left = memory
        self._held: dict[int, Arrays] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._held or self._file(key).exists()

    def put(self, key: int, arrays: Arrays) -> None:
        """Keep the arrays, which must not be changed afterwards."""
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._left:
            self._left -= size
            self._held[key] = arrays
            return
        # Names of tensors may hold anything; numpy makes file names of them.
        names = list(arrays)
        numbered = {f"a{i}": arrays[name] for i, name in enumerate(names)}
        np.savez(self._file(key), allow_pickle=False, names=np.array(names), **numbered)

    def get(self, key: int) -> Arrays:
        """The arrays under `key`, which must be there."""
        if key in self._held:
            return self._held[key]
        with np.load(self._file(key), allow_pickle=False) as archive:
            return {str(name): archive[f"a{i}"] for i, name in enumerate(archive["names"])}

    def _file(self, key: int) -> Path:
        return self._folder / f"{key}.npz"


class SampleStore:
    """Samples by position in the shuffled order."""

    def __init__(self, samples: Samples, folder: Path, *, memory: int = MEMORY, progress: Progress = SILENT) -> None:
        self.source = samples.source
        self._arrays = ArrayStore(folder, memory)
        self._bare: list[Sample] = []
        with progress.stage("reading samples", len(samples)) as advance:
            for index, sample in enumerate(samples):
                if index == 0:
                    _check_disk_space(sample, len(samples), memory, folder, self.source)
                self._arrays.put(index, sample.inputs)
                self._bare.append(dataclasses.replace(sample, inputs={}))
                advance(1)
        if not self._bare:
            raise DataError(f"{samples.source} holds no samples", "Give at least one")
        self._order = list(range(len(self._bare)))
        random.Random(_SEED).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def first(self, count: int) -> tuple[int, ...]:
        """Which samples of the source come first here, ascending."""
        return tuple(sorted(self._order[:count]))

    def __getitem__(self, position: int) -> Sample:
        index = self._order[position]
        return dataclasses.replace(self._bare[index], inputs=self._arrays.get(index))


def _check_disk_space(sample: Sample, count: int, memory: int, folder: Path, source: str) -> None:
    """Refuse before the disk is full: samples are taken to be as large as the first."""
    needed = sum(array.nbytes for array in sample.inputs.values()) * count - memory
    free = shutil.disk_usage(folder).free
    if needed > _MOST_OF_DISK * free:
        raise DataError(
            f"{source}: {count} samples take {needed / 1e9:.1f} GB of temporary space, of {free / 1e9:.1f} GB free",
            "Give fewer validation samples, or set TMPDIR to a larger disk",
        )
