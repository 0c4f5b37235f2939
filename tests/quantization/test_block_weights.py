"""Test `edgeq.quantization.block_weights` against the error of every range on a fine grid, and MatMulNBits' format."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeq.quantization.block_weights import BlockWeights, fit_blocks, pack, unpack


def error(matrix: np.ndarray, blocks: BlockWeights, importance: np.ndarray) -> float:
    return float((importance[:, None] * (matrix - blocks.matrix()) ** 2).sum(dtype=np.float64))


def nearest(x: np.ndarray, scale: float, zero: int, top: int) -> np.ndarray:
    return np.clip(np.rint(x / scale), -zero, top - zero)


def exhaustive(x: np.ndarray, w: np.ndarray, top: int) -> float:
    """Return the least weighted error of one block over all pairs of ends on a fine grid, each with a fitted scale."""
    best = np.inf
    for low, high in itertools.product(np.linspace(0.5, 1.05, 23), repeat=2):
        scale = (max(x.max(), 0) * high - min(x.min(), 0) * low) / top
        zero = int(np.clip(np.rint(-min(x.min(), 0) * low / scale), 0, top))
        for _ in range(3):
            d = nearest(x, scale, zero, top)
            if (w * d * d).sum() > 0:
                scale = (w * x * d).sum() / (w * d * d).sum()
            best = min(best, float((w * (x - scale * nearest(x, scale, zero, top)) ** 2).sum()))
    return best


def to_nearest(matrix: np.ndarray, size: int, top: int) -> float:
    """Return the squared error of rounding to a grid between the extremes of each block."""
    total = 0.0
    for column, start in itertools.product(range(matrix.shape[1]), range(0, len(matrix), size)):
        x = matrix[start : start + size, column].astype(np.float64)
        scale = (max(x.max(), 0) - min(x.min(), 0)) / top
        zero = int(np.clip(np.rint(-min(x.min(), 0) / scale), 0, top))
        total += ((x - scale * nearest(x, scale, zero, top)) ** 2).sum()
    return float(total)


@pytest.mark.parametrize("tail", [3, 30], ids=["heavy tails", "nearly normal"])
def test_close_to_an_exhaustive_search_and_better_than_the_nearest(tail: int) -> None:
    random = np.random.default_rng(tail)
    matrix = random.standard_t(tail, (64, 6)).astype(np.float32)
    importance = random.uniform(0.1, 4, 64).astype(np.float32)
    loss = error(matrix, fit_blocks(matrix, 4, 32, importance=importance), importance)
    smallest = sum(
        exhaustive(matrix[i : i + 32, n].astype(float), importance[i : i + 32].astype(float), 15)
        for i, n in itertools.product((0, 32), range(6))
    )
    assert loss < 1.05 * smallest
    ones = np.ones(64, np.float32)
    assert error(matrix, fit_blocks(matrix, 4, 32), ones) < 0.95 * to_nearest(matrix, 32, 15)


@settings(max_examples=50, deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 70), st.integers(1, 3)), elements=st.floats(-100, 100, width=32)),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 32]),
    st.booleans(),
)
def test_any_matrix(matrix: np.ndarray, bits: int, size: int, symmetric: bool) -> None:
    blocks = fit_blocks(matrix, bits, size, symmetric=symmetric)
    steps = np.abs(blocks.steps.T)
    assert blocks.integers.max(initial=0) < 1 << bits
    assert np.isfinite(blocks.matrix()).all()
    assert blocks.matrix().shape == matrix.shape
    # Inside the range the error is at most half a step. A narrower range gains more inside than it loses by clipping.
    low, high = blocks.limits
    inside = (matrix >= np.minimum(low * blocks.steps, high * blocks.steps).T) & (
        matrix <= np.maximum(low * blocks.steps, high * blocks.steps).T
    )
    tolerance = 1e-5 * np.abs(matrix).max(initial=0) + 1e-30
    assert (np.abs(matrix - blocks.matrix())[inside] <= (0.5 * steps + tolerance)[inside]).all()
    if symmetric:
        assert (blocks.zero_points == 1 << bits - 1).all()


@given(arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.integers(0, 15)))
def test_packed_and_back(integers: np.ndarray) -> None:
    stored = pack(integers, 4)
    assert stored.shape == (len(integers), -(-integers.shape[1] // 2))
    np.testing.assert_array_equal(unpack(stored, 4, integers.shape[1]), integers)
    np.testing.assert_array_equal(unpack(pack(integers, 8), 8, integers.shape[1]), integers)
    assert (stored[:, 0] & 15 == integers[:, 0]).all()


def test_other_integers_in_the_same_blocks() -> None:
    blocks = fit_blocks(np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), 4, 16)
    np.testing.assert_array_equal(blocks.with_differences(blocks.differences).matrix(), blocks.matrix())
    with pytest.raises(AssertionError, match="above their type"):
        blocks.with_differences(blocks.differences + 16)
