"""Measure classification with several labels: the mean average precision over classes.

The average precision of a class is the mean precision at each of its positives, in descending order of the scores.
Equal scores count as one step. Classes without a positive do not count. Source: scikit-learn, average_precision_score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, read_numbers
from edgeq.measure.task import TaskKind

_Labelled = tuple[dict[int, float], tuple[int, ...]]


def read(answer: Answer, sample: Sample) -> _Labelled:
    """Return the score of each class, and the classes of the label. The label lists their numbers; it may be empty."""
    numbers = read_numbers(sample)
    if (numbers != np.rint(numbers)).any() or (numbers < 0).any():
        raise DataError(f"{sample.name}: label {sample.label!r} does not list class numbers", 'Write it as "1 5 7"')
    return dict(answer.top), tuple(int(number) for number in numbers)


def average_precision(scores: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """Return the average precision of scores [N]; at least one is positive."""
    order = np.argsort(-scores, kind="stable")
    hits, ranked = np.cumsum(positive[order]), scores[order]
    # The last place of each run of equal scores.
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    steps = np.diff(np.concatenate([[0], hits[ends]]))
    return float((steps * hits[ends] / (ends + 1)).sum() / hits[-1])


def summarize(values: Sequence[_Labelled]) -> Mapping[str, float]:
    """Return "mAP" over the classes with a positive."""
    classes = sorted({number for _, numbers in values for number in numbers})
    if not classes:
        raise DataError("no sample has a label", "Raise ⟨count⟩")
    precisions = []
    for number in classes:
        scores = np.array([top.get(number, -1.0) for top, _ in values])
        precisions.append(average_precision(scores, np.array([number in numbers for _, numbers in values])))
    return {"mAP": float(np.mean(precisions))}


TASK = TaskKind(
    "multi-label",
    "mean average precision over classes",
    # All scores count, not only those that a user would be shown.
    lambda options: AnswerMetric(
        "multi-label", "mAP", read, summarize, frozenset({"multi-label"}), thresholds={"confidence": 0.0, "limit": 1e6}
    ),
    frozenset(),
)
