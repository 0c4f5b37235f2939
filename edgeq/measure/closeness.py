"""Limits on how closely outputs must follow float32, without labels: one set for all commands."""

from __future__ import annotations

import math
from typing import Literal

from edgeq.measure.agreement import Agreement

POOR_DB = 10.0
"""Below this, more than a tenth of the output's power is quantization noise."""
HEALTHY_DB = 20.0
"""From here on, at most a hundredth is."""
GOOD_DB = 30.0
"""From here on, more decibels hardly change an answer."""

Closeness = Literal["healthy", "noisy", "poor"]


def closeness(agreement: Agreement) -> Closeness:
    """Return how closely outputs follow float32's, by the worst output or slice of one.

    NaN and infinities of their own make them "poor". Outputs of which samples could not be compared are not "healthy".
    """
    found = worst_db(agreement)
    if not found >= POOR_DB:  # nor is NaN close
        return "poor"
    whole = not any(output.mismatched for output in agreement.outputs)
    return "healthy" if found >= HEALTHY_DB and whole else "noisy"


def worst_db(agreement: Agreement) -> float:
    """Return the SQNR in dB; minus infinity where an output is not finite and float32's is."""
    return -math.inf if any(output.nonfinite for output in agreement.outputs) else agreement.sqnr_db
