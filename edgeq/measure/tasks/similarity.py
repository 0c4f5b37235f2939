"""Measure the similarity of sentence (or image) pairs: the rank correlation between the cosine similarity of two
embeddings and a score given by people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.inference import Outputs
from edgeq.measure.paired_meter import PairedMeter
from edgeq.measure.rank_statistics import correlation, mean_ranks
from edgeq.measure.skill import CONFIDENT, Skill
from edgeq.measure.task import TaskKind
from edgeq.measure.task_inputs import pick_output
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Similarity(Displayed):
    """Score pairs of rows in a sample's batch: rows 0 and 1 are a pair, rows 2 and 3 are a pair, and so on. Each pair
    has one score.

    An output [rows, width] contains embeddings. An output [rows, positions, width] is averaged over the positions that
    a mask marks with a value other than 0. The mask is the input with "mask" in its name. Without a mask, all positions
    count.
    """

    output: str | None = None
    name: str = "similarity"
    primary: str = "spearman"
    higher_is_better: bool = True

    def start(self) -> SimilarityMeter:
        """Return a meter for rank correlation."""
        return SimilarityMeter(self)


class SimilarityMeter(PairedMeter):
    """Measure the correlation between the cosine similarity of two embeddings and a reference score. See
    `edgeq.measure.task.Meter`.
    """

    def __init__(self, task: Similarity) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the cosine similarity and the score of each pair of embeddings.

        Raises:
            DataError: an output is not an embedding, a label is not a number, or the batch does not have two rows for
                each score.
        """
        embedded = pool_embeddings(pick_output(outputs, self._task.output, sample), sample)
        scores = _read_pair_scores(sample)
        if len(embedded) != 2 * len(scores):
            raise DataError(
                f"{sample.name}: {len(embedded)} rows for {len(scores)} scores",
                "Give two rows and one score for each pair",
            )
        length = np.linalg.norm(embedded, axis=1, keepdims=True)
        # An embedding of zeros has no direction. Its cosine becomes 0.
        unit = embedded / np.where(length > 0, length, 1)
        self.add((unit[0::2] * unit[1::2]).sum(axis=1), scores)

    def result(self) -> Mapping[str, float]:
        """Return "spearman" and "pearson", from -1 to 1.

        Raises:
            DataError: all pairs have the same score.
        """
        cosines, scores = self.rows()
        if len(set(scores.tolist())) < 2:
            raise DataError(f"all {len(scores)} pairs have the same score", "Correlation needs different scores")
        return {
            "spearman": correlation(mean_ranks(cosines), mean_ranks(scores)),
            "pearson": correlation(cosines, scores),
        }

    def skill(self) -> Skill | None:
        """Return how the rank correlation compares with that of unrelated numbers. Return None if it is not defined."""
        cosines, scores = self.rows()
        if len(set(scores.tolist())) < 2 or not np.isfinite(cosines).all():
            return None
        value, reach = correlation(mean_ranks(cosines), mean_ranks(scores)), CONFIDENT / math.sqrt(len(scores) - 1)
        figure = f"the rank correlation is {value:.3f} on {len(scores)} pairs"
        fix = "Check ⟨preprocess⟩, ⟨task_output⟩, and that each pair has its own score"
        return Skill(figure, 0.0, value - reach, value + reach, "0", fix)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the rank correlation over each half. `halves` is [H, samples]. The correlation is NaN if all pairs of
        a half have the same score.
        """
        values = []
        for cosines, scores in self.halves(halves):
            # Equal scores have no order that could correlate.
            varied = len(np.unique(scores)) > 1
            values.append(correlation(mean_ranks(cosines), mean_ranks(scores)) if varied else np.nan)
        return np.array(values)


def pool_embeddings(output: NDArray[Any], sample: Sample) -> NDArray[np.float64]:
    """Return the embeddings, float64 [rows, width]. They are the output itself, or its mean over the positions that the
    mask marks.
    """
    values = np.asarray(output, np.float64)
    if values.ndim == 2:
        return values
    if values.ndim != 3:
        raise DataError(
            f"{sample.name}: an output of shape {list(values.shape)} is not an embedding",
            "Choose one of [rows, width] or [rows, positions, width] with ⟨task_output⟩",
        )
    # Tokenizers call the input attention_mask. Its shape tells it from masks of pairs of positions.
    fitting = [np.asarray(v) for n, v in sorted(sample.inputs.items()) if "mask" in n and v.shape == values.shape[:2]]
    mask = (fitting[0] != 0)[..., None] if fitting else np.ones((*values.shape[:2], 1), bool)
    summed: NDArray[np.float64] = np.where(mask, values, 0.0).sum(axis=1)
    # A mask may hide all positions of a row.
    summed /= np.maximum(mask.sum(axis=1), 1)
    return summed


def _read_pair_scores(sample: Sample) -> NDArray[np.float64]:
    if sample.label is None:
        raise DataError(f"{sample.name} has no label", "Give ⟨labels⟩, or compare with a ⟨reference⟩ model instead")
    label = np.asarray(sample.label).reshape(-1)
    if label.dtype.kind not in "iuf" or not np.isfinite(label.astype(np.float64)).all():
        raise DataError(f"{sample.name}: label {sample.label!r} is not a score", "Give a number for each pair")
    return label.astype(np.float64)


TASK = TaskKind(
    "similarity",
    "rank correlation of the cosine of two embeddings with a score",
    lambda options: Similarity(output=options.output),
    frozenset({"output"}),
)
