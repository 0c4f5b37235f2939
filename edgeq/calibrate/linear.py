"""Evenly spaced bins over a power-of-two window: what the methods that search for a threshold work on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgeq.calibrate.histogram import Float64s, Histogram

BINS = 4096
"""Bins a side. The window is the least power of two that holds the largest magnitude, so more than 2048 are in use."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A histogram without its exact zeros, which every quantization represents exactly.

    Attributes:
        counts: float64[2 × BINS]; bin i holds values from (i - BINS) × width to (i + 1 - BINS) × width.
        width: a power of two.
    """

    counts: Float64s
    width: float

    def centres(self) -> Float64s:
        return (np.arange(2 * BINS, dtype=np.float64) - BINS + 0.5) * self.width


def linear_of(histogram: Histogram) -> Linear:
    """Spread a histogram over linear bins.

    Bins of the histogram nest in the linear ones, but for the top octave, where each covers two and gives half to each.
    """
    keys, counts = histogram.keys, histogram.counts
    keep = keys != 0
    lower, upper = (edge[keep] for edge in histogram.edges())
    counts = counts[keep]
    if not counts.size:
        return Linear(np.zeros(2 * BINS), 1.0 / BINS)
    # The inner edge of the outermost bin says in which octave the largest magnitude is.
    inner = max(abs(float(upper[0])) if lower[0] < 0 else 0.0, float(lower[-1]) if upper[-1] > 0 else 0.0)
    width = 2.0 ** math.frexp(inner)[1] / BINS
    halves = np.concatenate([0.75 * lower + 0.25 * upper, 0.25 * lower + 0.75 * upper])
    places = np.floor(halves / width).astype(np.int64) + BINS
    spread: Float64s = np.bincount(places, np.concatenate([counts, counts]) / 2.0, minlength=2 * BINS).astype(
        np.float64
    )
    return Linear(spread, width)
