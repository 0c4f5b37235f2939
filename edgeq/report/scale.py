"""Axes: from values to places, and where their ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgeq.report.numbers import significant

_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_FROM = 8.0
"""An axis whose ends differ by more than this factor is logarithmic."""


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end, linearly or by the logarithm. Values outside land at the nearer end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * min(1.0, max(0.0, self.share(value)))

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`, beyond outside."""
        if self.log:
            if value <= 0:
                return 0.0
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> tuple[float, ...]:
        """At most about `most` round values between `low` and `high`, by powers of ten on a logarithmic axis."""
        return log_ticks(self.low, self.high, most) if self.log else nice_ticks(self.low, self.high, most)


def scale_for(
    values: Sequence[float], start: float, end: float, *, log: bool | None = None, pad: float = 0.06
) -> Scale:
    """A scale that holds all `values` with a margin of `pad` of its length at both ends.

    Args:
        log: None chooses by how far apart the values are; only positive ones can be on a logarithmic axis.
    """
    low, high = min(values), max(values)
    if log is None:
        log = low > 0 and high > _LOG_FROM * low
    if log:
        factor = max((high / low) ** pad, 1.02)
        return Scale(low / factor, high * factor, start, end, True)
    margin = (high - low) * pad or max(abs(high) * 0.05, 1e-9)
    return Scale(low - margin, high + margin, start, end)


def nice_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten inside low..high, at most `most`."""
    if not high > low:
        return (low,)
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for nice in (*_NICE, 20.0, 25.0):
        step = nice * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            return tuple(i * step for i in range(first, last + 1))
    return ()


def log_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """1, 2, 5 times powers of ten inside low..high, or fewer of them; evenly spaced ones where those are too few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**e for e in exponents for f in factors]
        inside = tuple(v for v in found if low * (1 - 1e-9) <= v <= high * (1 + 1e-9))
        if len(inside) <= most:
            return inside if len(inside) >= 2 else nice_ticks(low, high, most)
    return inside[:: math.ceil(len(inside) / most)]


def tick_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """The ticks as text, all with the decimals that tell them apart where they are evenly spaced."""
    if len(ticks) < 2:
        return tuple(significant(t) for t in ticks)
    steps = [b - a for a, b in pairwise(ticks)]
    even = max(steps) - min(steps) < 1e-6 * max(map(abs, steps))
    if not even or max(map(abs, ticks)) >= 1e6 or min(steps) < 1e-6:
        return tuple(significant(t).rstrip("0").rstrip(".") if "." in significant(t) else significant(t) for t in ticks)
    decimals = 0
    while decimals < 6 and any(abs(t - round(t, decimals)) > 1e-6 * steps[0] for t in ticks):
        decimals += 1
    return tuple(f"{t:.{decimals}f}".replace("-", "\u2212") if abs(t) > steps[0] * 1e-6 else "0" for t in ticks)
