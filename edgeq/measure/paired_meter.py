"""What the meters share whose metric needs all samples at once: two values a row, what was found and what is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Collected = tuple[list[NDArray[Any]], ...]


class PairedMeter:
    """Rows of samples: what a model makes of each, beside its label. See `edgeq.measure.task.Meter`."""

    def __init__(self) -> None:
        self._found: list[NDArray[Any]] = []
        self._wanted: list[NDArray[Any]] = []

    def add(self, found: NDArray[Any], wanted: NDArray[Any]) -> None:
        """Add the rows of one sample, [N] each."""
        self._found.append(found)
        self._wanted.append(wanted)

    def collected(self) -> Collected:
        """What was found and what is right, an array a sample each."""
        return self._found, self._wanted

    def take(self, collected: Collected) -> None:
        """Add the samples of another meter."""
        self._found += collected[0]
        self._wanted += collected[1]

    def rows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """What was found and what is right, [N] each, over all samples."""
        return np.concatenate(self._found), np.concatenate(self._wanted)

    def halves(self, halves: NDArray[np.bool_]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """`rows` of each of the halves [H, samples]."""
        found, wanted = self.rows()
        for chosen in np.repeat(halves, [len(one) for one in self._wanted], axis=1):
            yield found[chosen], wanted[chosen]
