"""Read samples once and keep them: in memory up to a limit, on disk beyond it.

Their order is a shuffle with a fixed seed, so any prefix represents all of them. Data folders are often sorted by
class. Without the shuffle, the first tenth would be a single class.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

from edgeq.data.array_store import ArrayStore, count_bytes, count_free_bytes
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.errors import DataError
from edgeq.tuning.sessions import STORED
from edgeq.util.display import SILENT, Progress


class SampleStore:
    """Store samples by their position in the shuffled order. The iterator returns them in the order of the source."""

    def __init__(self, samples: Samples, folder: Path, *, memory: int = STORED, progress: Progress = SILENT) -> None:
        self.source, self.digest = samples.source, samples.digest
        self._arrays = ArrayStore(folder, memory)
        self._without_inputs: list[Sample] = []
        with progress.stage("reading samples", len(samples)) as advance:
            for index, sample in enumerate(samples):
                # The first sample shows how much all need, so a full disk is reported before the reading.
                if index == 0:
                    _check_disk_space(sample, len(samples), memory, folder, self.source)
                self._arrays.add(index, sample.inputs)
                self._without_inputs.append(dataclasses.replace(sample, inputs={}))
                advance(1)
        if not self._without_inputs:
            raise DataError(f"{samples.source} holds no samples", "Give at least one")
        self._order = list(range(len(self._without_inputs)))
        random.Random(0).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sample]:
        return (
            dataclasses.replace(bare, inputs=self._arrays.get(index)) for index, bare in enumerate(self._without_inputs)
        )

    def source_positions(self, count: int) -> tuple[int, ...]:
        """Return the positions in the source, ascending, of the first `count` samples of the shuffled order."""
        return tuple(sorted(self._order[:count]))

    def source_position(self, position: int) -> int:
        """Return the position in the source of the sample at `position` in the shuffled order."""
        return self._order[position]

    def __getitem__(self, position: int) -> Sample:
        index = self._order[position]
        return dataclasses.replace(self._without_inputs[index], inputs=self._arrays.get(index))


def _check_disk_space(sample: Sample, count: int, memory: int, folder: Path, source: str) -> None:
    """Refuse samples that would fill the disk, assuming that each is as large as the first."""
    disk_bytes = count_bytes(sample.inputs) * count - memory
    free = count_free_bytes(folder)
    if disk_bytes > free:
        raise DataError(
            f"{source}: {count} samples take {disk_bytes / 1e9:.1f} GB of temporary space, of {free / 1e9:.1f} GB free",
            "Give fewer validation samples, or set TMPDIR to a larger disk",
        )
