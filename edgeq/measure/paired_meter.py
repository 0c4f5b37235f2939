"""Collect the results of a model and the labels, row by row, for metrics that need all rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Pairs = tuple[list[NDArray[Any]], ...]


class PairedMeter:
    """Collect the model's result for each row together with the row's label. See `Meter`."""

    def __init__(self) -> None:
        self._results: list[NDArray[Any]] = []
        self._labels: list[NDArray[Any]] = []

    def add(self, results: NDArray[Any], labels: NDArray[Any]) -> None:
        """Add the results and the labels of one sample, each [N]."""
        self._results.append(results)
        self._labels.append(labels)

    def collected(self) -> _Pairs:
        """Return the results and the labels, one array for each sample."""
        return self._results, self._labels

    def take(self, collected: _Pairs) -> None:
        """Add the samples of another meter."""
        self._results += collected[0]
        self._labels += collected[1]

    def rows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the results and the labels of all samples, each [N]."""
        return np.concatenate(self._results), np.concatenate(self._labels)

    def halves(self, halves: NDArray[np.bool_]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the `rows` of each half. `halves` is [H, samples]."""
        results, labels = self.rows()
        # A sample may have several rows. They stay together, because they are not independent.
        for half in np.repeat(halves, [len(sample_labels) for sample_labels in self._labels], axis=1):
            yield results[half], labels[half]
