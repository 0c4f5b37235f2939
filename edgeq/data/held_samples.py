"""Hold samples that were prepared once, because preparing them again often takes longer than running the model."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from edgeq.data.array_store import ArrayStore, count_bytes, count_free_bytes
from edgeq.data.sample import Sample

_MEMORY = 2**24
"""Bytes of samples that stay in memory. Samples are read from a file in a fraction of the time of an inference."""
_LIMIT = 2**28
"""Largest total size of the inputs, in bytes."""


class HeldSamples:
    """Hold samples in their order. Beyond `_MEMORY`, their inputs are on disk.

    Args:
        folder: folder for the inputs. Its owner deletes it.
    """

    def __init__(self, folder: Path) -> None:
        # Several sets of samples may be in one folder.
        self._folder = folder / f"samples-{secrets.token_hex(4)}"
        self._free_bytes = min(_LIMIT, _MEMORY + count_free_bytes(folder))
        self._store = ArrayStore(self._folder, _MEMORY)
        self._samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._get, range(len(self._samples)))

    def add(self, sample: Sample) -> bool:
        """Add a sample at the end. Return False if it does not fit, in which case this object is useless."""
        self._free_bytes -= count_bytes(sample.inputs)
        if self._free_bytes < 0:
            shutil.rmtree(self._folder, ignore_errors=True)  # it may not exist yet
            return False
        self._store.add(len(self._samples), sample.inputs)
        self._samples.append(replace(sample, inputs={}))
        return True

    def _get(self, place: int) -> Sample:
        return replace(self._samples[place], inputs=self._store.get(place))
