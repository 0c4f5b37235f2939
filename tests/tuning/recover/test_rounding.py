"""Compare `edgeq.quantization.gptq` with a trial of all roundings."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeq.quantization import gptq
from edgeq.quantization.gptq import damp, round_rows
from edgeq.quantization.params import weight_limits


def _error(row: np.ndarray, metric: np.ndarray) -> float:
    return float(row @ metric @ row)


def test_close_to_the_best_of_all_roundings() -> None:
    shares = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        mixing = random.normal(size=(6, 6))
        metric = damp((mixing @ mixing.T)[None] + 4.0, 0.01)
        row = random.normal(size=(1, 1, 6)) * 3
        found = round_rows(row, metric, np.array([[[-127]]]), np.array([[[127]]]))
        around = [sorted({int(np.floor(v)) + d for d in (-1, 0, 1, 2)}) for v in row[0, 0]]
        best = min(_error(row[0, 0] - np.array(q), metric[0]) for q in itertools.product(*around))
        plain = _error(row[0, 0] - np.rint(row[0, 0]), metric[0])
        mine = _error(row[0, 0] - found[0, 0], metric[0])
        shares.append((plain - mine) / (plain - best) if plain > best else 1.0)
    # It reaches most of the largest gain that any rounding has over rounding to the nearest.
    assert np.median(shares) > 0.8


def test_blocks_change_nothing() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(2, 5, 30)) * 4
    mixing = random.normal(size=(2, 30, 40))
    metric = damp(mixing @ mixing.transpose(0, 2, 1), 0.01)
    low, high = np.full((1, 1, 1), -127), np.full((1, 1, 1), 127)
    whole = round_rows(rows, metric, low, high, block=30)
    np.testing.assert_array_equal(whole, round_rows(rows, metric, low, high, block=7))


def test_independent_inputs_leave_the_nearest_integer() -> None:
    rows = np.random.default_rng(0).normal(size=(1, 4, 9)) * 5
    found = round_rows(rows, np.eye(9)[None], np.full((1, 1, 1), -127), np.full((1, 1, 1), 127))
    np.testing.assert_array_equal(found, np.rint(rows))


def test_integers_stay_within_their_limits() -> None:
    rows = np.random.default_rng(0).normal(size=(1, 4, 9)) * 200
    found = round_rows(rows, np.eye(9)[None], np.full((1, 1, 1), -64), np.full((1, 1, 1), 64))
    assert found.min() == -64
    assert found.max() == 64


def test_limits_are_those_of_the_quantizer() -> None:
    assert weight_limits("int8", False) == (-127, 127)
    assert weight_limits("int8", True) == (-64, 64)
    assert weight_limits("uint8", False) == (0, 255)
    assert weight_limits("uint8", True) == (0, 127)


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([1, 2, 9, 33, 70]))
@settings(max_examples=20, deadline=None)
def test_the_upper_factor_is_that_of_the_inverse(seed: int, groups: int, taps: int) -> None:
    mixing = np.random.default_rng(seed).normal(size=(groups, taps, taps + 3))
    metric = damp(mixing @ mixing.transpose(0, 2, 1), 0.1)
    upper = gptq._invert_factor(metric)
    np.testing.assert_allclose(upper, np.triu(upper), atol=1e-12)
    np.testing.assert_allclose(
        upper.transpose(0, 2, 1) @ upper @ metric, np.tile(np.eye(taps), (groups, 1, 1)), atol=1e-6
    )
