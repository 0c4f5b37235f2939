"""From an int32 accumulator to an int8 value, as the array and its models in C do it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Rounding = Literal["even", "header"]
"""How products with a float32 scale become integers.

- "even": round half to even; the hardware, and ONNX Runtime.
- "header": the macro of gemmini.h, which the CPU mode and the instruction-set simulator use. It rounds by truncating
  v ± 1 in float32, which differs from "even" in exactly the float32 values just below a power of two.
"""

_POWERS = 7


def rescale(accumulator: NDArray[np.int32], multiplier: Any, *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """R(f32(f32(accumulator) · multiplier)), not saturated; `multiplier` is float32 and broadcasts."""
    product: NDArray[np.float32] = accumulator.astype(np.float32)
    np.multiply(product, multiplier, out=product)
    return round_values(product, rounding=rounding)


def round_values(values: NDArray[np.float32], *, rounding: Rounding = "even") -> NDArray[np.float32]:
    """R(values). May work in place."""
    if rounding == "even":
        np.rint(values, out=values)
        return values
    rounded: NDArray[np.float32] = values.copy()
    np.rint(values, out=rounded)
    # v ± 1 rounds up to 2^k + 1 there; from 2^7 on, both answers saturate.
    for power in range(_POWERS):
        below = np.nextafter(np.float32(2**power), np.float32(0))
        for sign in (1, -1):
            rounded[values == sign * below] = sign * (2**power + 1)
    return np.asarray(rounded, np.float32)


def shift_right(accumulator: NDArray[np.int32], shifts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Accumulators divided by 2^shifts (which broadcast), half to even, in integers; negative shifts multiply."""
    wide = accumulator.astype(np.int64) << np.maximum(-shifts, 0)
    down = np.broadcast_to(np.maximum(shifts, 0), wide.shape)
    floor = wide >> down
    remaining = wide - (floor << down)
    half = np.where(down > 0, np.int64(1) << np.maximum(down - 1, 0), np.int64(1))
    up = (remaining > half) | ((remaining == half) & (floor & 1 == 1))
    return np.asarray(floor + (up & (down > 0)), np.float32)


def saturate(values: NDArray[np.float32], *, relu: bool = False) -> NDArray[np.int8]:
    """sat8, and max(·, 0) with `relu`."""
    np.clip(values, 0 if relu else -128, 127, out=values)
    return values.astype(np.int8)
