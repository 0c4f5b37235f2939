"""Matrix products of bytes, exact and as kernels have them that add two products in 16 bits.

The saturating kernels compute, for unsigned a and signed b,

    c[m, n] = sum over i of clip(a[m, 2i] b[2i, n] + a[m, 2i+1] b[2i+1, n], -2^15, 2^15 - 1)

on the raw bytes. Few pairs of weights can reach the clip, so only those are looked at: the exact product less what each
of their sums exceeds 16 bits by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.model.saturation import PAIR_LIMIT, as_pairs, pair_sums

_LOW, _HIGH = -(2**15), 2**15 - 1
# Products of bytes are below 2^16: so many of them sum up exactly in float32's 24 bits.
_EXACT_IN_FLOAT32 = 1 << 8
# OpenBLAS computes products of up to 2^18 multiply-adds on one thread, by a vector up to 2^13. For larger ones its
# threads wait for each other in busy loops: where other work has the cores, that took 20 times the processor time.
_ONE_THREAD, _COLUMNS = 1 << 18, 1 << 5


@dataclass(frozen=True, eq=False)
class Product:
    """A product of matrices.

    Attributes:
        values: int64, [M, N].
        clipped: per column, how many sums of two products were clipped; int64, [N].
        pairs: how many sums of two products there are in one column.
        largest: per column, the largest magnitude among the sums of two products that could be clipped beside some
            input; 0 where none could, or nothing was clipped at all. int64, [N].
    """

    values: NDArray[np.int64]
    clipped: NDArray[np.int64]
    pairs: int
    largest: NDArray[np.int64]


def exact_product(a: NDArray[Any], b: NDArray[Any]) -> Product:
    """[M, K] by [K, N], bytes of any sign, without saturation."""
    values = np.zeros((len(a), b.shape[1]), np.int64)
    for start in range(0, a.shape[1], _EXACT_IN_FLOAT32):
        part = slice(start, start + _EXACT_IN_FLOAT32)
        _add_product(values, a[:, part].astype(np.float32), b[part].astype(np.float32))
    nothing = np.zeros((2, b.shape[1]), np.int64)
    return Product(values, nothing[0], len(a) * ((a.shape[1] + 1) // 2), nothing[1])


def _add_product(values: NDArray[np.int64], a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    """Add a product to `values`, in parts that BLAS computes on one thread."""
    rows = max(_ONE_THREAD // (max(a.shape[1], 1) * _COLUMNS), 1)
    for top in range(0, len(a), rows):
        for left in range(0, b.shape[1], _COLUMNS):
            across, along = slice(top, top + rows), slice(left, left + _COLUMNS)
            values[across, along] += np.matmul(a[across], b[:, along]).astype(np.int64)


def saturating_product(a: NDArray[np.uint8], b: NDArray[np.int8]) -> Product:
    """[M, K] unsigned by [K, N] signed, each sum of two products clipped to 16 bits."""
    product, excess = _watched(a, b)
    return product if excess is None else replace(product, values=product.values - excess.T)


def watched_product(a: NDArray[np.uint8], b: NDArray[np.int8]) -> Product:
    """As `exact_product`, with what `saturating_product` would clip."""
    return _watched(a, b)[0]


def _watched(a: NDArray[np.uint8], b: NDArray[np.int8]) -> tuple[Product, NDArray[np.int32] | None]:
    """The exact product, and what clipping takes off it, [N, M]; None where that is nothing."""
    product = exact_product(a, b)
    if not a.size or not (pair_sums(b.T) > PAIR_LIMIT).any():
        return product, None
    # One row for each k and for each n: what is looked at together lies together.
    left = np.ascontiguousarray(a.T).astype(np.int32)
    if len(left) % 2:
        left = np.pad(left, ((0, 1), (0, 0)))
    first, second = as_pairs(b.T.astype(np.int32))
    suspects = _reach(left.max(axis=1), first, second)
    excess = np.zeros((b.shape[1], len(a)), np.int32)
    for i in np.flatnonzero(suspects.any(axis=0)):
        columns = np.flatnonzero(suspects[:, i])
        sums = left[2 * i] * first[columns, i, None]
        sums += left[2 * i + 1] * second[columns, i, None]
        over = sums - np.clip(sums, _LOW, _HIGH)
        excess[columns] += over
        product.clipped[columns] += np.count_nonzero(over, axis=1)
        product.largest[columns] = np.maximum(product.largest[columns], np.abs(sums).max(axis=1))
    return product, excess


def _reach(largest: NDArray[np.int32], first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.bool_]:
    """Which pairs of weights leave 16 bits beside some input, given the largest value there is at each k."""
    even, odd = largest[0::2], largest[1::2]
    above = even * np.maximum(first, 0) + odd * np.maximum(second, 0) > _HIGH
    return np.asarray(above | (even * np.minimum(first, 0) + odd * np.minimum(second, 0) < _LOW))
