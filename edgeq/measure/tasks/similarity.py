"""Sentence (or image) pairs: rank correlation of the cosine of their embeddings with a score given by people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample
from edgeq.errors import DataError
from edgeq.measure.bench import PairedMeter
from edgeq.measure.latency import Outputs
from edgeq.measure.task import TaskKind, TaskOptions, pick_output
from edgeq.util.display import Displayed

_MASK = "mask"


@dataclass(frozen=True)
class Similarity(Displayed):
    """A sample is a batch of pairs: rows 0 and 1 belong together, rows 2 and 3, and so on; one score a pair.

    An output [rows, width] is taken as embeddings. An output [rows, positions, width] is averaged over the positions
    that the input whose name has "mask" in it marks with a value other than 0; over all where no input does.
    """

    output: str | None = None
    name: str = "similarity"
    primary: str = "spearman"
    higher_is_better: bool = True

    def start(self) -> SimilarityMeter:
        """A meter of rank correlation."""
        return SimilarityMeter(self)


def similarity(options: TaskOptions) -> Similarity:
    """The task of the command line's options."""
    return Similarity(output=options.output)


class SimilarityMeter(PairedMeter):
    def __init__(self, task: Similarity) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the cosine of each pair of embeddings and its score.

        Raises:
            DataError: an output that is no embedding, a label that is no number, or not two rows a score.
        """
        embedded = embeddings(pick_output(outputs, self._task.output, sample), sample)
        scores = _scores(sample)
        if len(embedded) != 2 * len(scores):
            raise DataError(
                f"{sample.name}: {len(embedded)} rows for {len(scores)} scores", "Give two rows and one score a pair"
            )
        length = np.linalg.norm(embedded, axis=1, keepdims=True)
        unit = embedded / np.where(length > 0, length, 1)
        self.add((unit[0::2] * unit[1::2]).sum(axis=1), scores)

    def result(self) -> Mapping[str, float]:
        """ "spearman" and "pearson", from -1 to 1.

        Raises:
            DataError: all pairs have the same score.
        """
        found, wanted = self.rows()
        if len(set(wanted.tolist())) < 2:
            raise DataError(f"all {len(wanted)} pairs have the same score", "Correlation needs different ones")
        return {"spearman": correlation(mean_ranks(found), mean_ranks(wanted)), "pearson": correlation(found, wanted)}

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Rank correlation over each of the halves [H, samples]; NaN where all pairs of one have the same score."""
        values = []
        for found, wanted in self.halves(halves):
            varied = len(np.unique(wanted)) > 1
            values.append(correlation(mean_ranks(found), mean_ranks(wanted)) if varied else np.nan)
        return np.array(values)


def embeddings(output: NDArray[Any], sample: Sample) -> NDArray[np.float64]:
    """[rows, width] float64: the output itself, or its mean over the positions that count."""
    values = np.asarray(output, np.float64)
    if values.ndim == 2:
        return values
    if values.ndim != 3:
        raise DataError(
            f"{sample.name}: an output of shape {list(values.shape)} is no embedding",
            "Choose one of [rows, width] or [rows, positions, width] with --task-output",
        )
    fitting = [np.asarray(v) for n, v in sorted(sample.inputs.items()) if _MASK in n and v.shape == values.shape[:2]]
    mask = (fitting[0] != 0)[..., None] if fitting else np.ones((*values.shape[:2], 1), bool)
    summed: NDArray[np.float64] = np.where(mask, values, 0.0).sum(axis=1)
    summed /= np.maximum(mask.sum(axis=1), 1)
    return summed


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Pearson's coefficient; NaN where a value is NaN, 0 where one side is constant."""
    x, y = a - a.mean(), b - b.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def mean_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1 on, ties sharing the mean of theirs. All NaN where a value is NaN."""
    if np.isnan(values).any():
        return np.full(values.shape, np.nan)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(times) - (times - 1) / 2)[place]
    return ranks


def _scores(sample: Sample) -> NDArray[np.float64]:
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give --labels, or compare with a --reference model instead")
    label = np.asarray(sample.label).reshape(-1)
    if label.dtype.kind not in "iuf" or not np.isfinite(label.astype(np.float64)).all():
        raise DataError(f"{sample.name}: label {sample.label!r} is no score", "Give a number for each pair")
    return label.astype(np.float64)


TASK = TaskKind(
    "similarity",
    "rank correlation of the cosine of two embeddings with a score",
    similarity,
    frozenset({"output"}),
)
