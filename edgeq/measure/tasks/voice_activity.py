"""Measure voice activity detection: the ROC AUC over windows, and the share of missed speech at 1 % false alarms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from edgeq_device.answers.answer import Answer
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.answer_metric import AnswerMetric, read_numbers
from edgeq.measure.rank_statistics import roc_auc
from edgeq.measure.task import TaskKind

_FALSE_ALARMS = 0.01
_Windows = tuple[NDArray[Any], NDArray[Any]]


def read(answer: Answer, sample: Sample) -> _Windows:
    """Return the probabilities and labels of the windows. The label has 0 or 1 for each window, or one for all."""
    labels, values = read_numbers(sample), np.asarray(answer.vector, np.float64).reshape(-1)
    if not np.isin(labels, (0, 1)).all() or labels.size not in (1, values.size):
        raise DataError(
            f"{sample.name}: {labels.size} labels for {values.size} windows", "Give 1 (speech) or 0 for each window"
        )
    return values, np.broadcast_to(labels, values.shape).astype(np.int64)


def find_miss_rate(scores: NDArray[Any], labels: NDArray[Any], false_alarms: float = _FALSE_ALARMS) -> float:
    """Return the least share of positives below a threshold at which at most `false_alarms` of the negatives reach it.

    It is NaN if there are no positives or no negatives.
    """
    positives, negatives = scores[labels == 1], np.sort(scores[labels == 0])[::-1]
    if not len(positives) or not len(negatives):
        return math.nan
    # So many negatives may reach the threshold, so it lies above the next one.
    allowed = math.floor(false_alarms * len(negatives) + 1e-9)
    return float((positives <= negatives[allowed]).mean()) if allowed < len(negatives) else 0.0


def summarize(values: Sequence[_Windows]) -> Mapping[str, float]:
    """Return "auc" and "miss"."""
    scores, labels = (np.concatenate(arrays) for arrays in zip(*values, strict=True))
    if not 0 < labels.sum() < len(labels):
        raise DataError("all windows have the same label", "Give windows with and without speech")
    return {"auc": roc_auc(scores, labels), "miss": find_miss_rate(scores, labels)}


TASK = TaskKind(
    "voice-activity",
    "ROC AUC over windows, and missed speech at 1 % false alarms",
    lambda options: AnswerMetric("voice-activity", "auc", read, summarize, frozenset({"voice"})),
    frozenset(),
)
