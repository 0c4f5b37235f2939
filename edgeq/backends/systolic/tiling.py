"""How large products are cut into pieces that the array's memories hold.

Sizes are in tiles of dim × dim elements. A product of [I, K] with [K, J] keeps a piece of both in the scratchpad and
the int32 result in the accumulator:

    (I·K + K·J) · dim rows of scratchpad, I·J · dim rows of accumulator

each at most the memory, or half of it where the next piece is loaded meanwhile (weight stationary). A convolution
keeps, for a piece of b images, orows × ocols outputs (before pooling), och output and kch input channels,

    ⌈kch / dim⌉ · b · irows · icols + ⌈och / dim⌉ · krows · kcols · kch rows of scratchpad,
    ⌈och / dim⌉ · b · orows · ocols rows of accumulator
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeq.backends.systolic.array import ArrayConfig


@dataclass(frozen=True)
class ProductTiles:
    """A piece of a product, in tiles of dim."""

    i: int
    j: int
    k: int


def product_tiles(rows: int, columns: int, depth: int, array: ArrayConfig) -> ProductTiles:
    """The largest piece that fits: it starts as a balanced one and grows a tile at a time in j, i and k."""
    share = 2 if array.dataflow == "WS" else 1
    scratchpad = array.scratchpad_rows // share // array.dim
    accumulator = array.accumulator_rows // share // array.dim
    whole = tuple(-(-size // array.dim) for size in (rows, columns, depth))
    side = max(math.isqrt(accumulator), 1)
    tile = [min(whole[0], side), min(whole[1], side), 1]
    tile[2] = max(min(whole[2], scratchpad // (tile[0] + tile[1])), 1)

    def fits(i: int, j: int, k: int) -> bool:
        """Whether i x j tiles of the product, k deep, fit into accumulator and scratchpad; all in tiles of `dim`."""
        return (i + j) * k <= scratchpad and i * j <= accumulator

    grown = True
    while grown:
        grown = False
        for axis in (1, 0, 2):
            larger = tile.copy()
            larger[axis] += 1
            if larger[axis] <= whole[axis] and fits(*larger):
                tile, grown = larger, True
    return ProductTiles(*tile)
