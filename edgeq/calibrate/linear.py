"""Evenly spaced bins over a power-of-two window: what the methods that search for a threshold work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgeq.calibrate.histogram import MANTISSA_BITS, Float64s, Histogram, order_of

_OCTAVE = 1 << MANTISSA_BITS
BINS = 4 * _OCTAVE
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
        """float64[2 × BINS]: the value in the middle of each bin."""
        return (np.arange(2 * BINS, dtype=np.float64) - BINS + 0.5) * self.width


def linear_of(histogram: Histogram) -> Linear:
    """Spread a histogram over linear bins.

    Bins of the histogram nest in the linear ones, but for the top octave, where each covers two and gives half to each.
    """
    keep = histogram.keys != 0
    order, counts = order_of(histogram.keys[keep]), histogram.counts[keep].astype(np.float64)
    if not counts.size:
        return Linear(np.zeros(2 * BINS), 1.0 / BINS)
    magnitude = np.abs(order)
    top = int(magnitude.max()) >> MANTISSA_BITS
    # A bin's first value as a whole number of the linear bins of the top octave, then of wider ones octave by octave.
    leading = (magnitude & (_OCTAVE - 1)) | np.where(magnitude >= _OCTAVE, _OCTAVE, 0)
    octave = np.maximum(magnitude >> MANTISSA_BITS, 1)
    steps = np.minimum(max(top, 1) - octave, 31)
    inner = (leading * (BINS // (2 * _OCTAVE))) >> steps
    places = np.where(order < 0, BINS - 1 - inner, BINS + inner)
    split = steps == 0
    # Halves of whole numbers are exact, so the order of adding does not matter.
    counts[split] /= 2
    beside = places[split] + np.where(order[split] < 0, -1, 1)
    parts = np.bincount(places, counts, 2 * BINS), np.bincount(beside, counts[split], 2 * BINS)
    spread = np.add(*parts, dtype=np.float64)
    return Linear(spread, 2.0 ** (max(top, 1) - 126) / BINS)
