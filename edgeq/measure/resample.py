"""Estimate how much a loss depends on the choice of samples: the standard error of the difference between two models.

If the metric is a mean of scores, the estimate is the standard error of the mean difference between the two models'
scores. Any other metric (mAP, AUC, F1, a correlation) is computed again for many random halves of the samples. Both
models get the same halves, so the difficulty that they share cancels. Each sample is in a half with probability one
half, so its weight is 0 or 2. These weights have mean and variance 1. With such weights, the deviations from the metric
over all samples follow the metric's sampling distribution, as they do in the bootstrap (A. Owen, D. Eckles:
Bootstrapping data arrays of arbitrary order, 2012, "double-or-nothing"). No sample counts twice. So the method also
works for meters that refuse a sample that they have already seen, and for meters that count ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.data.sample import Sample
from edgeq.errors import DataError
from edgeq.measure.inference import Outputs
from edgeq.measure.skill import find_doubts
from edgeq.measure.task import Meter, Task

# With so many halves, the standard error itself is known to about 7 %.
HALVES = 100
METERED = 32
"""Number of halves if the task's meter cannot compute the halves itself. Each half then has its own meter."""
# With fewer halves, the standard error would be wrong by more than a quarter.
_FEWEST_HALVES = 8


@dataclass(frozen=True)
class RowMetrics:
    """Hold one model's metrics over some rows, and the spread of the primary metric.

    Attributes:
        scores: score of each row. Their mean is the primary metric. None if the task has no such scores.
        halves: primary metric over each half; NaN for a half for which it is undefined (such as the AUC of a single
            class). Empty if there are `scores`.
    """

    metrics: Mapping[str, float]
    scores: NDArray[np.float64] | None = None
    halves: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class ResampledMeter:
    """Measure one model over the rows so far, and estimate the uncertainty of the figures. The argument is the task.

    The estimate uses `scores()` or `resampled(halves)` of the task's meter (see `Meter`). If the meter has neither, a
    separate meter is used for each half, which costs `METERED` / 2 updates for each row.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._meter = task.start()
        alone = hasattr(self._meter, "scores") or hasattr(self._meter, "resampled")
        self._halves: list[Meter] = [] if alone else [task.start() for _ in range(METERED)]
        # The fixed seed gives every model the same halves.
        self._random = np.random.default_rng(0)
        self._members = np.zeros(METERED, np.int64)
        self.rows = 0

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add one row: a model's outputs, and the sample with its label."""
        self._meter.update(outputs, sample)
        self.rows += 1
        if self._halves:
            for half in np.flatnonzero(self._random.random(METERED) < 0.5):
                self._halves[half].update(outputs, sample)
                self._members[half] += 1

    def notes(self) -> tuple[str, ...]:
        """Return reasons to doubt the figures of the rows so far."""
        return find_doubts(self._meter)

    def measured(self) -> RowMetrics:
        """Return the metrics so far."""
        if not self._halves:
            metrics = measure_rows(self._meter, self.rows)
            assert metrics is not None, "the meter has one of the two methods"
            return metrics
        # A half without rows has no metric.
        values = [self._value(m) if n else math.nan for m, n in zip(self._halves, self._members, strict=True)]
        return RowMetrics(dict(self._meter.result()), None, np.asarray(values, np.float64))

    def _value(self, half: Meter) -> float:
        try:
            return half.result()[self._task.primary]
        except DataError:
            return math.nan


def measure_rows(meter: Any, rows: int, metrics: Mapping[str, float] | None = None) -> RowMetrics | None:
    """Return the metrics of a meter over `rows` rows. Return None if the meter has neither `scores` nor `resampled`, so
    that the spread of the metrics is not known.

    Args:
        metrics: the meter's result, if it is known.
    """
    if not hasattr(meter, "scores") and not hasattr(meter, "resampled"):
        return None
    metrics = dict(meter.result()) if metrics is None else metrics
    if hasattr(meter, "scores"):
        return RowMetrics(metrics, np.asarray(meter.scores(), np.float64))
    return RowMetrics(metrics, None, np.asarray(meter.resampled(draw_halves(rows)), np.float64))


def draw_halves(rows: int) -> NDArray[np.bool_]:
    """Draw the rows of each half, bool[HALVES, rows].

    The halves are the same for every model. If there are more rows, the halves of the first rows do not change.
    """
    return (np.random.default_rng(0).random((rows, HALVES)) < 0.5).T


def loss_error(reference: RowMetrics, candidate: RowMetrics, *, further: float) -> float | None:
    """Return the standard error of the difference between two models' primary metrics on the same rows. Return None if
    it is unknown.

    Args:
        further: standard error to add for differences that only other rows would show. Without it, the error would be 0
            if the models agree on all measured rows.
    """
    if reference.scores is not None and candidate.scores is not None:
        differences = reference.scores - candidate.scores
        # A single difference has no spread.
        if len(differences) < 2:
            return None
        return math.hypot(float(differences.std(ddof=1)) / math.sqrt(len(differences)), further)
    differences = reference.halves - candidate.halves
    # Halves without a metric, such as those with a single class, are left out.
    finite = differences[np.isfinite(differences)]
    return math.hypot(float(finite.std(ddof=1)), further) if len(finite) >= _FEWEST_HALVES else None


SURE = 1.96
"""Two-sided 95 % quantile of the normal distribution."""


def loss_interval(task: Task, reference: RowMetrics, candidate: RowMetrics, rows: int) -> tuple[float, float] | None:
    """Return the 95 % interval of the loss of a model against a reference over many other samples, from the metrics of
    both over the same `rows` rows. Return None if it is not known.

    A model that agrees with the reference on all rows may still lose one row on as many others.
    """
    error = loss_error(reference, candidate, further=1 / rows)
    if error is None:
        return None
    drop = reference.metrics[task.primary] - candidate.metrics[task.primary]
    drop = drop if task.higher_is_better else -drop
    return drop - SURE * error, drop + SURE * error
