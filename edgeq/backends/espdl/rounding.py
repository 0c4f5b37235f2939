"""Round as the runtime does: half up on the ESP32-S3 and the chips without SIMD, half to even on the ESP32-P4 and S31.

Source: espressif/esp-dl 3.3.9, dl/tool/src/dl_tool.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.network import LIMITS

Rounding = Literal["half-up", "half-even"]
INTEGERS, FLOATS = np.int64, np.float32


@dataclass(frozen=True)
class ChipArithmetic:
    """Describe the arithmetic of a family of chips.

    Attributes:
        rounding: what happens to a number in the middle of two integers.
        lane_bits: bits of the SIMD accumulators of 8-bit products, which saturate; 32 if sums never saturate.
        tie_margin: how far above a tie a float still counts as a tie. The P4 rounds by an instruction, which is exact.
            The runtime's C code for other machines has a margin.
    """

    rounding: Rounding
    lane_bits: int = 32
    tie_margin: float = 0.0

    def shift(self, sums: NDArray[np.int64], shifts: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sums / 2^shifts, rounded. `shifts` are not negative and broadcast against the sums."""
        shifts = np.asarray(shifts, INTEGERS)
        floors = sums >> shifts
        remainders = sums - (floors << shifts)
        twice, whole = remainders << 1, np.left_shift(INTEGERS(1), shifts)
        ties = twice == whole
        # Without a shift there is no remainder, so nothing is rounded.
        up = (twice > whole) | (ties & ((floors & 1 == 1) | (self.rounding == "half-up")))
        return np.asarray(floors + up, INTEGERS)

    def round(self, numbers: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return float32 numbers as integers."""
        if self.rounding == "half-even":
            nearest = np.rint(numbers)
            if not self.tie_margin:
                return nearest.astype(INTEGERS)
            magnitudes = np.abs(numbers) + FLOATS(0.5)
            up = np.floor(magnitudes)
            ties = (magnitudes - up < self.tie_margin) & (up % 2 == 1)
            return np.asarray(np.sign(numbers) * (up - ties), INTEGERS)
        # The runtime adds 0.5 in float64 and rounds the sum to float32 before it takes the floor.
        return np.floor((numbers.astype(np.float64) + 0.5).astype(FLOATS)).astype(INTEGERS)

    def places(self, codes: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """Return the index of the entry of a table that is nearest to each code, which counts from 0."""
        return self.shift(codes, step.bit_length() - 1)


def saturate(numbers: NDArray[np.int64], type_: str) -> NDArray[Any]:
    """Return integers clipped to a type of activations."""
    low, high = LIMITS[type_]
    return np.asarray(numbers.clip(low, high), type_)


def scale_of(exponent: int) -> np.float32:
    """Return 2^exponent."""
    return FLOATS(2.0**exponent)
