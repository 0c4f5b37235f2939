"""Store a constant matrix as blocks of few-bit integers. Each block has the scale and zero point with the least squared
error.

An integer q of a block represents scale * (q - zero point). If the range of a block covers all its weights, a few large
weights use up most of the steps. So edgeq also tries, for each block, ranges that are narrower at either end. A range
gives the integers d = q - zero point for the weights x. The least-squares scale for these integers is sum(w x d) /
sum(w d^2). It reduces the weighted error from sum(w x^2) by sum(w x d)^2 / sum(w d^2). If the mean squares of the
inputs are known, w is the mean square of the input that is multiplied by x. (The "k-quants" of llama.cpp search for the
scale and minimum of a block in a similar way.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)
# Factors for both ends of a block's range. The search first tries every pair of these factors, then takes steps from
# the best pair. If it tried every pair of a fine grid, the error would be half a percent smaller, at thirty times the
# work (tests/quantization/test_block_weights.py, benchmarks/blocks.py).
_SHRUNK = (1.0, 0.9, 0.8, 0.7)
_STEPS = (0.05, 0.025)
_REFITS = 2
# Number of weights that are searched at once. It is small enough for their data to stay in the cache.
_BATCH = 1 << 16
# With this number of bits or more, the steps are so fine that narrower ranges gain nothing.
_FINE_BITS = 8


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Hold a matrix [k, n] in blocks along k, in the layout of MatMulNBits.

    The last block of a column is padded with zeros.

    Attributes:
        k: number of rows of the matrix.
        bits: number of bits of an integer.
        integers: uint8 [n, blocks, block size].
        scales: float32 [n, blocks].
        zero_points: uint8 [n, blocks].
        symmetric: True if every zero point is the middle, 2^(bits - 1), and is not stored.
    """

    k: int
    bits: int
    integers: NDArray[np.uint8]
    scales: Floats
    zero_points: NDArray[np.uint8]
    symmetric: bool

    @property
    def differences(self) -> NDArray[np.int64]:
        """Return the integers minus their zero points, int64 [n, k]."""
        return self._rows(self.integers.astype(np.int64) - self.zero_points[:, :, None])

    @property
    def steps(self) -> Floats:
        """Return the scale of each weight, float32 [n, k]."""
        return self._rows(np.broadcast_to(self.scales[:, :, None], self.integers.shape))

    @property
    def limits(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the smallest and largest difference that each weight can have, int64 [n, k]."""
        low = -np.broadcast_to(self.zero_points[:, :, None].astype(np.int64), self.integers.shape)
        return self._rows(low), self._rows(low + (1 << self.bits) - 1)

    def matrix(self) -> Floats:
        """Return the numbers that the integers represent, float32 [k, n]."""
        return np.ascontiguousarray((self.differences * self.steps).astype(np.float32).T)

    def of_outputs(self, columns: NDArray[np.int64]) -> BlockWeights:
        """Return only the blocks of the columns in `columns`."""
        parts = {name: getattr(self, name)[columns] for name in ("integers", "scales", "zero_points")}
        return replace(self, **parts)

    def with_differences(self, differences: NDArray[np.int64]) -> BlockWeights:
        """Return a copy with new integers. `differences` are these integers minus their zero points, int64 [n, k]."""
        padded = np.zeros((len(differences), self.integers[0].size), np.int64)
        padded[:, : self.k] = differences
        integers = padded.reshape(self.integers.shape) + self.zero_points[:, :, None]
        assert integers.min() >= 0, "integers below their type"
        assert integers.max() < 1 << self.bits, "integers above their type"
        return BlockWeights(self.k, self.bits, integers.astype(np.uint8), self.scales, self.zero_points, self.symmetric)

    def _rows(self, blocks: NDArray[T]) -> NDArray[T]:
        return blocks.reshape(len(blocks), -1)[:, : self.k]


def fit_blocks(
    matrix: Floats, bits: int, size: int, *, symmetric: bool = False, importance: Floats | None = None
) -> BlockWeights:
    """Quantize a matrix in blocks.

    Args:
        matrix: float32 [k, n].
        bits: number of bits of an integer, 2 to 8.
        size: number of weights in a block.
        symmetric: whether the zero point is in the middle and is not stored.
        importance: mean square of each input, float32 [k]; with None, all inputs count equally.

    Returns:
        The blocks. Of the candidates that were tried, each block has the one with the smallest weighted squared error.
    """
    k, n = matrix.shape
    blocks = -(-k // size)
    padded = np.zeros((n, blocks * size), np.float32)
    padded[:, :k] = matrix.T
    weights = np.zeros(blocks * size, np.float32)
    # Importance is scaled, because the squares of small inputs would underflow in float32. Only ratios within a block
    # matter.
    weights[:k] = 1 if importance is None else importance / np.maximum(importance.max(initial=0), np.float32(1e-30))
    rows = padded.reshape(n * blocks, size)
    per_block = np.maximum(weights.reshape(blocks, size), np.float32(1e-6)) * (np.arange(blocks * size) < k).reshape(
        blocks, size
    )
    scales, zeros = np.ones(len(rows), np.float32), np.zeros(len(rows), np.uint8)
    integers = np.empty(rows.shape, np.uint8)
    step = max(1, _BATCH // (blocks * size)) * blocks  # a whole number of columns
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = np.ascontiguousarray(rows[part].T)
        search = _BlockSearch(x, np.tile(per_block.T, x.shape[1] // blocks), bits)
        fitted, scales[part], zeros[part] = search.symmetric() if symmetric else search.asymmetric()
        integers[part] = fitted.T
    return BlockWeights(
        k, bits, integers.reshape(n, blocks, size), scales.reshape(n, blocks), zeros.reshape(n, blocks), symmetric
    )


def pack(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack integers [..., count] of 4 or 8 bits into bytes [..., ceil(count * bits / 8)].

    A byte contains two 4-bit integers, the first in its lower half.
    """
    if bits == 8:
        return integers
    if integers.shape[-1] % 2:
        integers = np.concatenate([integers, np.zeros((*integers.shape[:-1], 1), np.uint8)], axis=-1)
    return np.ascontiguousarray(integers[..., ::2] | integers[..., 1::2] << 4)


def unpack(stored: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Unpack `count` integers from the result of `pack`."""
    if bits == 8:
        return stored[..., :count]
    both = np.stack([stored & 15, stored >> 4], axis=-1)
    return np.ascontiguousarray(both.reshape(*stored.shape[:-1], -1)[..., :count])


class _BlockSearch:
    """Hold the best scale and zero point found so far for each of r blocks.

    The weights x and their importance are arrays [size, r]. An operation on all blocks at once then reads contiguous
    memory.
    """

    def __init__(self, x: Floats, weights: Floats, bits: int) -> None:
        self._x, self._weights = x, weights
        self._weighted = weights * x
        self._bits = bits
        self._top = (1 << bits) - 1
        self._gain = np.full(x.shape[1], -1, np.float32)
        self._scale = np.ones(x.shape[1], np.float32)
        self._zero = np.zeros(x.shape[1], np.float32)

    def asymmetric(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        """Search with any zero point, and return integers, scales and zero points."""
        low, high = np.minimum(self._x.min(0), 0), np.maximum(self._x.max(0), 0)
        ends = np.ones((2, len(low)), np.float32)

        def attempt(factors: Floats) -> None:
            scale = (factors[1] * high - factors[0] * low) / self._top
            scale[scale == 0] = 1
            better = self._try(scale, np.clip(np.rint(-factors[0] * low / scale), 0, self._top))
            ends[:, better] = factors[:, better]

        if self._bits >= _FINE_BITS:
            attempt(ends.copy())
        else:
            for pair in product(_SHRUNK, repeat=2):
                attempt(np.repeat(np.array(pair, np.float32)[:, None], len(low), axis=1))
            for step in _STEPS:
                best = ends.copy()
                for moves in product((-step, 0, step), repeat=2):
                    attempt(best + np.array(moves, np.float32)[:, None])
        return self._best_blocks()

    def symmetric(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        """Search with every zero point in the middle, and return integers, scales and zero points.

        Negative scales are tried too, because the integers have one more step below zero than above.
        """
        middle = np.full(self._x.shape[1], 1 << self._bits - 1, np.float32)
        widest = np.abs(self._x).max(0) / middle
        widest[widest == 0] = 1
        shares = np.linspace(0.6, 1.15, 1 if self._bits >= _FINE_BITS else 12, dtype=np.float32)
        for share, sign in product(shares if len(shares) > 1 else (1.0,), (1, -1)):
            self._try(sign * share * widest, middle)
        return self._best_blocks()

    def _differences(self, scale: Floats, zero: Floats) -> Floats:
        nearest: Floats = self._x / scale
        np.rint(nearest, out=nearest)
        # np.clip takes three times as long as these two lines.
        np.maximum(nearest, -zero, out=nearest)
        np.minimum(nearest, self._top - zero, out=nearest)
        return nearest

    def _try(self, scale: Floats, zero: Floats) -> NDArray[np.bool_]:
        """Try a candidate for each block: fit its scale, and keep it if it is better than the best so far.

        Return for each block whether the candidate is better, [r].
        """
        differences = self._differences(scale, zero)
        along = np.einsum("sr,sr->r", self._weighted, differences)
        power = np.einsum("sr,sr->r", self._weights * differences, differences)
        fitted = np.divide(along, power, out=scale.copy(), where=(power > 0) & (along != 0))
        gain = fitted * along
        better: NDArray[np.bool_] = gain > self._gain
        self._gain[better], self._scale[better], self._zero[better] = gain[better], fitted[better], zero[better]
        return better

    def _best_blocks(self) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
        for _ in range(_REFITS):
            self._try(self._scale.copy(), self._zero.copy())
        integers = self._differences(self._scale, self._zero) + self._zero
        return integers.astype(np.uint8), self._scale, self._zero.astype(np.uint8)
