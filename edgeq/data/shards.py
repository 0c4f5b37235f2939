"""Samples in shards, for workers: by reference where workers can read the data themselves, else with the samples.

Where one shard ends and the next begins depends on the samples alone, not on the number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from edgeq.data.samples import Sample, Samples, SourceSamples
from edgeq.distributed.workers import Workers
from edgeq.errors import DataError

# Many enough that the last one does not keep the others waiting, few enough that merging them costs little.
_SHARDS, _LEAST, _MOST = 16, 8, 512
_STREAMED_BYTES = 1 << 23


@dataclass(frozen=True)
class Shard:
    """Samples `start` to `stop` (exclusive), with the samples where they are streamed."""

    start: int
    stop: int
    samples: tuple[Sample, ...] | None = None

    def __str__(self) -> str:
        return f"samples {self.start} to {self.stop - 1}"

    def read(self, reference: SourceSamples | None) -> Iterator[Sample]:
        """The samples, in a worker; `reference` is that of the `Sharded` that it comes from."""
        if self.samples is not None:
            yield from self.samples
            return
        part = reference.part(self.start, self.stop) if reference is not None else None
        assert part is not None, "samples without a reference are streamed"
        yield from part


class Sharded:
    """Samples, at most `count`, cut up for `workers`.

    Attributes:
        total: how many.
        reference: the samples, for workers to read themselves; None where they are streamed: they come from Python, or
            not all workers see the same files.
    """

    def __init__(self, samples: Samples, workers: Workers, count: int | None = None) -> None:
        self._samples = samples
        self.total = len(samples) if count is None else min(count, len(samples))
        self.reference: SourceSamples | None = None
        if (
            isinstance(samples, SourceSamples)
            and samples.readable
            and workers.everywhere(reads_the_same, samples, fingerprint(samples))
        ):
            self.reference = samples

    def shards(self, first: int = 0) -> Iterator[Shard]:
        """All shards from sample `first` on."""
        size = min(_MOST, max(_LEAST, -(-self.total // _SHARDS)))
        if self.reference is not None:
            for start in range(first, self.total, size):
                yield Shard(start, min(start + size, self.total))
            return
        remaining = itertools.islice(iter(self._samples), first, self.total)
        start = first
        for sample in remaining:
            held = sum(array.nbytes for array in sample.inputs.values())
            fitting = max(1, min(size, _STREAMED_BYTES // max(1, held)))
            part = (sample, *itertools.islice(remaining, fitting - 1))
            yield Shard(start, start + len(part), part)
            start += len(part)


def fingerprint(samples: SourceSamples) -> str:
    """A digest of the first, the middle and the last sample's files, and how many records there are."""
    total = len(samples.selection)
    parts = [samples.records(range(at, at + 1)).digest() for at in sorted({0, total // 2, total - 1})]
    return " ".join([str(len(samples.opened.records)), *parts])


def reads_the_same(samples: SourceSamples, expected: str) -> bool:
    """Whether this process, a worker, reads what the sender of `samples` does."""
    try:
        return fingerprint(samples) == expected
    except (DataError, OSError):
        return False
