"""Test sums of two products in 16 bits against a plain implementation of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.emulate.kernels import multiply_exactly, multiply_saturating, multiply_watched
from edgeq.model.saturation import PAIR_LIMIT, pair_sums


def spelled_out(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = np.zeros((len(a), b.shape[1]), np.int64)
    clipped, largest = np.zeros((2, b.shape[1]), np.int64)
    for m in range(len(a)):
        for n in range(b.shape[1]):
            for k in range(0, a.shape[1], 2):
                total = sum(int(a[m, j]) * int(b[j, n]) for j in range(k, min(k + 2, a.shape[1])))
                clipped[n] += total != (kept := max(-32768, min(32767, total)))
                values[m, n] += kept
                largest[n] = max(largest[n], abs(total))
    return values, clipped, largest


def test_products_are_computed_in_parts_for_which_blas_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, multiply = [], np.matmul

    def counted(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        parts.append((a.size * b.shape[1], 1 in (len(a), b.shape[1])))
        return multiply(a, b)

    monkeypatch.setattr("edgeq.emulate.kernels.np.matmul", counted)
    random = np.random.default_rng(0)
    for m, k, n in ((300, 700, 130), (1, 512, 97), (5000, 3, 1), (2, 0, 3)):
        a, b = random.integers(0, 256, (m, k)).astype(np.uint8), random.integers(-128, 128, (k, n)).astype(np.int8)
        np.testing.assert_array_equal(multiply_exactly(a, b).values, a.astype(np.int64) @ b.astype(np.int64))
    assert sum(size for size, _ in parts) == 300 * 700 * 130 + 512 * 97 + 15000
    assert max(size for size, _ in parts) <= 2**18
    assert max(size for size, by_vector in parts if by_vector) <= 2304 * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**31), st.sampled_from([20, 80, 200]))
def test_as_defined(m: int, k: int, n: int, seed: int, width: int) -> None:
    random = np.random.default_rng(seed)
    a = random.integers(0, 256, (m, k)).astype(np.uint8)
    b = np.clip(random.normal(0, width, (k, n)), -128, 127).astype(np.int8)
    values, clipped, largest = spelled_out(a, b)
    product, watched = multiply_saturating(a, b), multiply_watched(a, b)
    np.testing.assert_array_equal(product.values, values)
    for found in (product, watched):
        np.testing.assert_array_equal(found.clipped, clipped)
        np.testing.assert_array_equal(found.largest[clipped > 0], largest[clipped > 0])
        assert (found.largest <= largest).all()
    for exact in (multiply_exactly(a, b), watched):
        np.testing.assert_array_equal(exact.values, a.astype(np.int64) @ b.astype(np.int64))


def test_the_known_example() -> None:
    a, b = np.full((1, 64), 255, np.uint8), np.full((64, 1), 127, np.int8)
    assert multiply_saturating(a, b).values.item() == 1048544
    assert multiply_exactly(a, b).values.item() == 2072640


def test_long_sums_are_exact() -> None:
    a, b = np.full((1, 5000), 255, np.uint8), np.full((5000, 1), -128, np.int8)
    assert multiply_exactly(a, b).values.item() == 5000 * 255 * -128


def test_the_limit_is_the_largest_that_cannot_saturate() -> None:
    for first, second, safe in ((64, 64, True), (127, 1, True), (-128, 0, True), (65, 64, False), (-65, -64, False)):
        weights = np.array([[first, second]], np.int8)
        assert (pair_sums(weights) <= PAIR_LIMIT).all() == safe
        product = multiply_saturating(np.full((1, 2), 255, np.uint8), weights.T)
        assert (product.clipped == 0).all() == safe


def test_weights_of_different_sign_do_not_add_up() -> None:
    assert pair_sums(np.array([[127, -128, 3]], np.int8)).tolist() == [[128, 3]]
