"""Write PAD operators, with fillers in the numbers that a tensor stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeq.backends.litert.lower import Lowering
from edgeq.backends.litert.network import TfliteTensor


def pad(work: Lowering, source: TfliteTensor, pads: Sequence[tuple[int, int]], value: float) -> TfliteTensor:
    """Write a PAD that fills with `value`. In an integer tensor, the filler is the integer that represents the number
    nearest to `value`.
    """
    wide = tuple(size + front + end for size, (front, end) in zip(source.shape, pads, strict=True))
    padded = work.like(source, f"{source.name}/padded", wide)
    table = work.fixed("paddings", np.array(pads, np.int32))
    filler, zero = filler_of(source, value)
    # PAD fills with the zero point. Only another filler needs PADV2.
    if filler == zero:
        return work.emit("PAD", (source, table), padded)
    kind = source.type
    constant = work.fixed("padding", np.array([filler], np.dtype(kind)), source.scales)
    return work.emit("PADV2", (source, table, constant), padded)


def filler_of(source: TfliteTensor, value: float) -> tuple[float, float]:
    """Return the stored numbers that represent `value` and 0 in a tensor."""
    if source.scales is None:
        return (float(np.finfo(np.float32).min) if value == -np.inf else value), 0.0
    zero = int(source.scales.zero[0])
    limits = np.iinfo(source.type)
    # The lowest integer is below every other, which is all that a maximum needs.
    if value == -np.inf:
        return limits.min, zero
    return int(np.clip(np.rint(value / float(source.scales.scale[0])) + zero, limits.min, limits.max)), zero
