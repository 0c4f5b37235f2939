"""Turn sums of squares and products into decibels and cosines, with an answer for signals and noise of zero."""

from __future__ import annotations

import math


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two powers: infinity without noise, minus infinity without signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def cosine(product: float, a: float, b: float) -> float:
    """Return the cosine of two vectors from the sum of their products and their powers `a` and `b`."""
    if a == 0 or b == 0:
        return 1.0 if a == b else 0.0
    # Rounding can place the quotient a few ulp outside -1..1.
    return max(-1.0, min(1.0, product / (math.sqrt(a) * math.sqrt(b))))
