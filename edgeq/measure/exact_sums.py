"""Sum numbers so that the result does not depend on their order, because workers return their sums in any order."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Each summand keeps 40 bits. A block covers 8 exponents, so an int64 can hold the sum of 2^14 summands and a part that
# is not full.
_BITS, _BLOCK, _FULL = 40, 8, 61


@dataclass
class ExactSums:
    """Sum numbers, with one sum for each index.

    Each summand is rounded to 40 bits and then added exactly, so the sum does not depend on the order.

    Attributes:
        parts: for each block b of exponents, sums in units of 2^(8 b - 40).
    """

    parts: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, values: Floats) -> None:
        """Add rows of numbers, [rows, indices]."""
        mantissa, exponent = np.frexp(np.clip(values, -sys.float_info.max, sys.float_info.max))
        block, shift = np.divmod(exponent, _BLOCK)
        integers = np.rint(mantissa * 2.0**_BITS).astype(np.int64) << shift
        for place in np.unique(block):
            self._add(int(place), np.where(block == place, integers, 0).sum(0))

    def merge(self, chunk: ExactSums) -> None:
        """Add other sums of the same indices."""
        for place, part in chunk.parts.items():
            self._add(place, part)

    def _add(self, place: int, part: NDArray[np.int64]) -> None:
        total = self.parts[place] + part if place in self.parts else part
        if (np.abs(total) >> _FULL).any():  # Leave space for further summands.
            carry = total >> _BLOCK
            total = total - (carry << _BLOCK)
            self._add(place + 1, carry)
        self.parts[place] = total

    def total(self) -> Floats:
        """Return the sum of each index. A sum that overflows counts as the largest float64."""
        if not self.parts:
            return np.zeros(1)
        # Digits of one block each are the same however the parts were added up.
        sums, carry = np.zeros(1), np.zeros(1, np.int64)
        place, highest_place = min(self.parts), max(self.parts)
        with np.errstate(over="ignore"):
            while place <= highest_place or ((carry != 0) & (carry != -1)).any():
                digits = carry + self.parts.get(place, 0)
                carry = digits >> _BLOCK
                sums = sums + np.ldexp((digits - (carry << _BLOCK)).astype(np.float64), _BLOCK * place - _BITS)
                place += 1
            sums = sums + np.ldexp(carry.astype(np.float64), _BLOCK * place - _BITS)
        clipped: Floats = np.clip(sums, -sys.float_info.max, sys.float_info.max)
        return clipped
