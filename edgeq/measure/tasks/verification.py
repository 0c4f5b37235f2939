"""Measure embeddings of people or things: verification of pairs, and search for the same identity.

The label is the identity: a number or a name. All pairs of samples are compared by the cosine of their embeddings.

    tar          share of pairs of one identity above the threshold that 1 in 1000 pairs of two identities exceeds
    accuracy     share of pairs on the right side of a threshold, each kind with half of the weight: the mean over 10
                 folds of samples, with the best threshold of the other nine, as for Labeled Faces in the Wild
    recall@1, recall@5    share of samples with one of their identity among the nearest 1 or 5 others

Samples whose identity comes once do not count in recall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, read_label
from edgeq.measure.task import TaskKind

_FOLDS, _FALSE_ACCEPTS = 10, 1e-3
# All pairs of more samples would fill the memory.
_MOST_SAMPLES = 4096
_Identified = tuple[NDArray[Any], str]


def read(answer: Answer, sample: Sample) -> _Identified:
    """Return the embedding of unit length, and the identity."""
    vector = np.asarray(answer.vector, np.float64).reshape(-1)
    if not np.isfinite(vector).all():
        raise DataError(f"{sample.name}: the embedding is not finite", "Check the model and its preprocessing")
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector, str(read_label(sample))


def accept_rate(same: NDArray[Any], different: NDArray[Any], false_accepts: float = _FALSE_ACCEPTS) -> float:
    """Return the share of `same` [N] above the threshold that at most `false_accepts` of `different` [M] exceed."""
    ranked = np.sort(different)[::-1]
    allowed = math.floor(false_accepts * len(ranked) + 1e-9)
    return float((same > ranked[allowed]).mean()) if allowed < len(ranked) else 1.0


def best_threshold(same: NDArray[Any], different: NDArray[Any]) -> float:
    """Return the threshold with the highest balanced accuracy: pairs of one identity lie above it. Of several, return
    the lowest.
    """
    steps = np.concatenate([[-np.inf], np.unique(np.concatenate([same, different]))])
    above = 1 - np.searchsorted(np.sort(same), steps, "right") / len(same)
    below = np.searchsorted(np.sort(different), steps, "right") / len(different)
    return float(steps[int((above + below).argmax())])


def summarize(values: Sequence[_Identified]) -> Mapping[str, float]:
    """Return the figures of the module's table."""
    if len(values) > _MOST_SAMPLES:
        raise DataError(f"{len(values)} samples make too many pairs", f"Give at most {_MOST_SAMPLES} with ⟨count⟩")
    vectors = np.stack([vector for vector, _ in values])
    numbers = np.unique([name for _, name in values], return_inverse=True)[1]
    cosines, equal = vectors @ vectors.T, numbers[:, None] == numbers
    first, second = np.triu_indices(len(values), 1)
    scores, same = cosines[first, second], equal[first, second]
    if not 0 < same.sum() < len(same):
        raise DataError("the samples are all of one identity, or all of different ones", "Give at least two of each")
    np.fill_diagonal(cosines, -np.inf)
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :5]
    hits, repeated = np.take_along_axis(equal, nearest, axis=1), equal.sum(axis=1) > 1
    return {
        "tar": accept_rate(scores[same], scores[~same]),
        "accuracy": _fold_accuracy(scores, same, first),
        "recall@1": float(hits[repeated, :1].any(axis=1).mean()),
        "recall@5": float(hits[repeated].any(axis=1).mean()),
    }


def _fold_accuracy(scores: NDArray[Any], same: NDArray[np.bool_], samples: NDArray[Any]) -> float:
    accuracies = []
    for fold in range(_FOLDS):
        test = samples % _FOLDS == fold
        parts = [scores[mask & kind] for mask in (~test, test) for kind in (same, ~same)]
        # A fold without one of both kinds tells nothing.
        if all(len(part) for part in parts):
            threshold = best_threshold(parts[0], parts[1])
            accuracies.append(((parts[2] > threshold).mean() + (parts[3] <= threshold).mean()) / 2)
    return float(np.mean(accuracies)) if accuracies else math.nan


TASK = TaskKind(
    "verification",
    "share of accepted pairs of one identity at 0.1 % false ones, accuracy and recall@k of embeddings",
    lambda options: AnswerMetric("verification", "tar", read, summarize, frozenset({"embedding"})),
    frozenset(),
)
