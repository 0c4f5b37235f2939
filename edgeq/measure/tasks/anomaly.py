"""Anomaly detection by an autoencoder: ROC AUC of the reconstruction error against labels 0 (normal) and 1."""

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
from edgeq.measure.task import TaskKind, TaskOptions, integer_labels, only_input, pick_output
from edgeq.measure.tasks.similarity import mean_ranks
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Anomaly(Displayed):
    """The score is the mean squared difference of output and input.

    A sample with one label gives one score over its whole batch (the windows of one recording); a sample with a label
    per row gives one score a row.
    """

    output: str | None = None
    name: str = "anomaly"
    primary: str = "auc"
    higher_is_better: bool = True

    def start(self) -> AnomalyMeter:
        """A meter of ROC AUC."""
        return AnomalyMeter(self)


def anomaly(options: TaskOptions) -> Anomaly:
    """The task of the command line's options."""
    return Anomaly(output=options.output)


class AnomalyMeter(PairedMeter):
    def __init__(self, task: Anomaly) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the mean squared reconstruction error of a sample, or of each of its rows.

        Raises:
            DataError: a label other than 0 and 1, an output of another shape than the input, or labels that fit neither
                the sample nor its rows.
        """
        labels = integer_labels(sample)
        if not np.isin(labels, (0, 1)).all():
            raise DataError(f"{sample.name}: label {sample.label!r}", "Anomaly labels are 0 (normal) and 1 (anomalous)")
        given = np.asarray(only_input(sample), np.float64)
        made = np.asarray(pick_output(outputs, self._task.output, sample), np.float64)
        if given.shape != made.shape:
            raise DataError(
                f"{sample.name}: input {list(given.shape)}, but output {list(made.shape)}",
                "An autoencoder gives back its input's shape",
            )
        if len(labels) not in (1, len(given)):
            raise DataError(
                f"{sample.name}: {len(labels)} labels for a batch of {len(given)}", "Give one label, or one a row"
            )
        self.add(((given - made) ** 2).reshape(len(labels), -1).mean(axis=1), labels)

    def result(self) -> Mapping[str, float]:
        """ "auc", from 0 to 1.

        Raises:
            DataError: all samples have the same label.
        """
        scores, labels = self.rows()
        if not 0 < labels.sum() < len(labels):
            raise DataError(
                f"all {len(labels)} samples are labelled {labels[0]}", "AUC needs both; raise --count or use --stride"
            )
        return {"auc": roc_auc(scores, labels)}

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """AUC over each of the halves [H, samples]; NaN where all of one have the same label."""
        return np.array([roc_auc(scores, labels) for scores, labels in self.halves(halves)])


def roc_auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, a tie counting one half.

    Mann and Whitney's U over the number of pairs, from mean ranks. NaN where a score is NaN or all labels
    are the same.
    """
    positives = labels == 1
    p = int(positives.sum())
    n = len(labels) - p
    if not p or not n:
        return float("nan")
    return float((mean_ranks(scores)[positives].sum() - p * (p + 1) / 2) / (p * n))


TASK = TaskKind(
    "anomaly",
    "ROC AUC of an autoencoder's reconstruction error",
    anomaly,
    frozenset({"output"}),
)
