"""Matrix products of bytes, exact and as kernels have them that add two products in 16 bits.

The saturating kernels compute, for unsigned a and signed b,

    c[m, n] = sum over i of clip(a[m, 2i] b[2i, n] + a[m, 2i+1] b[2i+1, n], -2^15, 2^15 - 1)

on the raw bytes. A pair of weights whose sum (of one sign) stays under `PAIR_LIMIT` cannot reach the clip, so only the
other pairs are looked at: the exact product less what each of their sums exceeds 16 bits by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.model.pairs import PAIR_LIMIT, as_pairs, pair_sums

_LOW, _HIGH = -(2**15), 2**15 - 1
# Products of bytes are below 2^16: so many of them sum up exactly in float32's 24 bits.
_EXACT_IN_FLOAT32 = 1 << 8


@dataclass(frozen=True, eq=False)
class Product:
    """A product of matrices.

    Attributes:
        values: int64, [M, N].
        clipped: per column, how many sums of two products were clipped; int64, [N].
        pairs: how many sums of two products there are in one column.
    """

    values: NDArray[np.int64]
    clipped: NDArray[np.int64]
    pairs: int


def exact_product(a: NDArray[Any], b: NDArray[Any]) -> Product:
    """[M, K] by [K, N], bytes of any sign, without saturation."""
    kind = np.float32 if a.shape[1] <= _EXACT_IN_FLOAT32 else np.float64
    values = (a.astype(kind) @ b.astype(kind)).astype(np.int64)
    return Product(values, np.zeros(b.shape[1], np.int64), len(a) * ((a.shape[1] + 1) // 2))


def saturating_product(a: NDArray[np.uint8], b: NDArray[np.int8]) -> Product:
    """[M, K] unsigned by [K, N] signed, each sum of two products clipped to 16 bits."""
    product = exact_product(a, b)
    values, clipped = product.values, product.clipped
    first, second = as_pairs(b.T.astype(np.int32))
    suspects = pair_sums(b.T) > PAIR_LIMIT
    left = a.astype(np.int32)
    for i in np.flatnonzero(suspects.any(axis=0)):
        columns = np.flatnonzero(suspects[:, i])
        sums = left[:, 2 * i, None] * first[columns, i]
        if 2 * i + 1 < left.shape[1]:
            sums += left[:, 2 * i + 1, None] * second[columns, i]
        excess = sums - np.clip(sums, _LOW, _HIGH)
        values[:, columns] -= excess
        clipped[columns] += np.count_nonzero(excess, axis=0)
    return product
