"""Hold samples that were prepared once, because preparing them again often takes longer than running the model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

from edgeq_device.system.places import make_scratch

from edgeq.data.array_store import ArrayStore, count_bytes, count_free_bytes
from edgeq.data.sample import Sample

_MEMORY = 2**24
"""Bytes of samples that stay in memory. Samples are read from a file in a fraction of the time of an inference."""


class HeldSamples:
    """Hold samples in their order. Beyond `_MEMORY`, their inputs are in a temporary folder, which is deleted with this
    object.

    Args:
        limit: largest total size of the inputs, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._free_bytes = limit
        self._store: ArrayStore | None = None
        self._samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return map(self._get, range(len(self._samples)))

    def add(self, sample: Sample) -> bool:
        """Add a sample at the end. Return False if it does not fit, in which case this object is useless."""
        if self._store is None:
            folder, remove = make_scratch("edgeq-samples-")
            weakref.finalize(self, remove)
            self._store = ArrayStore(folder, _MEMORY)
            self._free_bytes = min(self._free_bytes, _MEMORY + count_free_bytes(folder))
        self._free_bytes -= count_bytes(sample.inputs)
        if self._free_bytes < 0:
            return False
        self._store.add(len(self._samples), sample.inputs)
        self._samples.append(replace(sample, inputs={}))
        return True

    def _get(self, place: int) -> Sample:
        assert self._store is not None
        return replace(self._samples[place], inputs=self._store.get(place))
