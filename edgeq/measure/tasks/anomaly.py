"""Measure anomaly detection with an autoencoder: the ROC AUC of its reconstruction error against labels 0 (normal) and
1 (anomalous).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.inference import Outputs
from edgeq.measure.paired_meter import PairedMeter
from edgeq.measure.rank_statistics import roc_auc
from edgeq.measure.skill import CONFIDENT, Skill
from edgeq.measure.task import TaskKind
from edgeq.measure.task_inputs import pick_input, pick_output, read_integer_labels
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Anomaly(Displayed):
    """Score each sample by the mean squared difference between output and input.

    A sample with one label gets one score for its whole batch (the windows of one recording). A sample with a label for
    each row gets one score for each row.
    """

    output: str | None = None
    name: str = "anomaly"
    primary: str = "auc"
    higher_is_better: bool = True

    def start(self) -> AnomalyMeter:
        """Return a meter for ROC AUC."""
        return AnomalyMeter(self)


class AnomalyMeter(PairedMeter):
    """Measure the ROC AUC of the reconstruction error. See `edgeq.measure.task.Meter`."""

    def __init__(self, task: Anomaly) -> None:
        super().__init__()
        self._task = task

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add the mean squared reconstruction error of a sample, or of each row if the sample has a label for each row.

        Raises:
            DataError: a label is not 0 or 1, the output does not have the shape of the input, or the number of labels
                fits neither the sample nor its rows.
        """
        labels = read_integer_labels(sample)
        if not np.isin(labels, (0, 1)).all():
            raise DataError(f"{sample.name}: label {sample.label!r}", "Anomaly labels are 0 (normal) and 1 (anomalous)")
        original = np.asarray(pick_input(sample), np.float64)
        reconstruction = np.asarray(pick_output(outputs, self._task.output, sample), np.float64)
        if original.shape != reconstruction.shape:
            raise DataError(
                f"{sample.name}: input {list(original.shape)}, but output {list(reconstruction.shape)}",
                "Give an autoencoder: its output has its input's shape",
            )
        # Any other number of labels could not be assigned to rows.
        if len(labels) not in (1, len(original)):
            raise DataError(
                f"{sample.name}: {len(labels)} labels for a batch of {len(original)}",
                "Give one label, or one for each row",
            )
        # A single label stands for the whole batch, so the batch has a single score.
        self.add(((original - reconstruction) ** 2).reshape(len(labels), -1).mean(axis=1), labels)

    def result(self) -> Mapping[str, float]:
        """Return "auc", from 0 to 1.

        Raises:
            DataError: all samples have the same label.
        """
        scores, labels = self.rows()
        # The AUC compares anomalous samples with normal ones, so both must be present.
        if not 0 < labels.sum() < len(labels):
            raise DataError(
                f"all {len(labels)} samples are labelled {labels[0]}", "AUC needs both; raise ⟨count⟩ or use ⟨stride⟩"
            )
        return {"auc": roc_auc(scores, labels)}

    def skill(self) -> Skill | None:
        """Return how the AUC compares with that of scores that ignore the input. Return None without both labels.

        The interval uses the AUC's standard error for such scores (H. Mann, D. Whitney, 1947).
        """
        scores, labels = self.rows()
        p, n = int(labels.sum()), int((1 - labels).sum())
        auc = roc_auc(scores, labels)
        # Labels of one kind, or a score of NaN, leave nothing to compare.
        if not math.isfinite(auc):
            return None
        reach = CONFIDENT * math.sqrt((p + n + 1) / (12 * p * n))
        fix = "Check ⟨preprocess⟩, and that the labels are 0 for normal and 1 for anomalous samples"
        return Skill(f"AUC is {auc:.3f} on {p + n} scores", 0.5, auc - reach, auc + reach, "0.5", fix)

    def resampled(self, halves: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the AUC over each half. `halves` is [H, samples]. The AUC is NaN for a half whose samples all have the
        same label.
        """
        return np.array([roc_auc(scores, labels) for scores, labels in self.halves(halves)])


TASK = TaskKind(
    "anomaly",
    "ROC AUC of an autoencoder's reconstruction error",
    lambda options: Anomaly(output=options.output),
    frozenset({"output"}),
)
