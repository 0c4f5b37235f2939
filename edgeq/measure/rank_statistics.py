"""Compute statistics of ranks: mean ranks, the area under the ROC curve, and correlation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def roc_auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the area under the ROC curve. This is the probability that a positive scores above a negative, where a tie
    counts one half.

    The area equals Mann and Whitney's U divided by the number of pairs, computed from mean ranks. It is NaN if a score
    is NaN or all labels are the same.
    """
    positives = labels == 1
    p = int(positives.sum())
    n = len(labels) - p
    if not p or not n:
        return float("nan")
    # p (p + 1) / 2 is the least sum of ranks that p positives can have.
    return float((mean_ranks(scores)[positives].sum() - p * (p + 1) / 2) / (p * n))


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return Pearson's correlation coefficient. It is NaN if a value is NaN, and 0 if `a` or `b` is constant."""
    x, y = a - a.mean(), b - b.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size else 0.0


def mean_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rank of each value, beginning with 1. Equal values share their mean rank. All ranks are NaN if a value
    is NaN.
    """
    if np.isnan(values).any():
        return np.full(values.shape, np.nan)
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    # The cumulated count is the last rank of a tie. Its mean rank lies half of the tie before it.
    ranks: NDArray[np.float64] = (np.cumsum(times) - (times - 1) / 2)[place]
    return ranks
