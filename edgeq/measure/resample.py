"""How much a loss depends on which samples it was measured on: the standard error of the difference of two models.

Where the metric is a mean of scores, that is the standard error of the mean of their differences. Any other (mAP, AUC,
F1, a correlation) is computed anew over many random halves of the samples, the same ones for both models, so that what
is hard for both cancels. In such a half a sample counts with probability one half, that is with weight 0 or 2: weights
of mean and variance 1, under which the deviations from the whole follow its sampling distribution as they do under the
bootstrap's (A. Owen, D. Eckles: Bootstrapping data arrays of arbitrary order, 2012, "double-or-nothing"). No
sample counts twice, so a meter that refuses to see one again, and one that counts ties, is served as it is.
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
from edgeq.measure.task import Meter, Task

HALVES = 100
METERED = 32
"""Halves where a meter cannot compute them itself, and a meter is kept for each."""
_FEWEST_HALVES = 8


@dataclass(frozen=True)
class Measured:
    """One model's metrics over some rows, and how its primary metric spreads.

    Attributes:
        scores: of each row, their mean being the primary metric; None where the task has none.
        halves: the primary metric over each half; NaN where it has none (AUC of one class). Empty with `scores`.
    """

    metrics: Mapping[str, float]
    scores: NDArray[np.float64] | None = None
    halves: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class ResampledMeter:
    """One model's metrics over the rows so far, with what it takes to find their doubt. Argument: the task.

    Of a task's meter it uses, where it has them, `scores()` and `resampled(halves)` (see `edgeq.measure.task.Meter`);
    else it keeps a meter for each half, which costs `METERED` / 2 updates a row.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole = task.start()
        alone = hasattr(self._whole, "scores") or hasattr(self._whole, "resampled")
        self._halves: list[Meter] = [] if alone else [task.start() for _ in range(METERED)]
        self._random = np.random.default_rng(0)
        self._members = np.zeros(METERED, np.int64)
        self.rows = 0

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add one row: a model's outputs, and the sample with its label."""
        self._whole.update(outputs, sample)
        self.rows += 1
        if self._halves:
            for half in np.flatnonzero(self._random.random(METERED) < 0.5):
                self._halves[half].update(outputs, sample)
                self._members[half] += 1

    def measured(self) -> Measured:
        """So far."""
        metrics = dict(self._whole.result())
        if hasattr(self._whole, "scores"):
            return Measured(metrics, np.asarray(self._whole.scores(), np.float64))
        if hasattr(self._whole, "resampled"):
            values: Any = self._whole.resampled(random_halves(self.rows))
        else:
            values = [self._value(m) if n else math.nan for m, n in zip(self._halves, self._members, strict=True)]
        return Measured(metrics, None, np.asarray(values, np.float64))

    def _value(self, half: Meter) -> float:
        try:
            return half.result()[self._task.primary]
        except DataError:
            return math.nan


def random_halves(rows: int) -> NDArray[np.bool_]:
    """Which rows are in which half, [HALVES, rows]: the same for every model, and for the rows that come first."""
    return (np.random.default_rng(0).random((rows, HALVES)) < 0.5).T


def loss_error(reference: Measured, candidate: Measured, *, further: float) -> float | None:
    """Standard error of the difference of two models' primary metrics on the same rows; None where it is not known.

    Args:
        further: standard error of what these rows do not show and others may: the spread of rows that all agree is 0.
    """
    if reference.scores is not None and candidate.scores is not None:
        differences = reference.scores - candidate.scores
        if len(differences) < 2:
            return None
        return math.hypot(float(differences.std(ddof=1)) / math.sqrt(len(differences)), further)
    differences = reference.halves - candidate.halves
    known = differences[np.isfinite(differences)]
    return math.hypot(float(known.std(ddof=1)), further) if len(known) >= _FEWEST_HALVES else None
