"""Test axes: round ticks, inside, not too many, with distinct labels."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.reporting.figures import Scale, log_ticks, nice_ticks, scale_for, tick_labels

VALUES = st.floats(-1e6, 1e6).map(lambda v: round(v, 6))
POSITIVE = st.floats(1e-6, 1e6)


@given(VALUES, st.floats(1e-3, 1e6), st.integers(2, 12))
def test_nice_ticks(low: float, length: float, most: int) -> None:
    high = low + length
    ticks = nice_ticks(low, high, most)
    assert len(ticks) <= most
    slack = 1e-6 * max(abs(low), abs(high), length)
    assert all(low - slack <= t <= high + slack for t in ticks)
    if most >= 4:
        assert len(ticks) >= 2


def test_ticks_are_multiples_of_one_two_or_five() -> None:
    assert nice_ticks(0, 100, 6) == (0, 20, 40, 60, 80, 100)
    assert nice_ticks(55.97, 56.78, 6) == pytest.approx((56.0, 56.2, 56.4, 56.6))
    assert nice_ticks(3, 3) == (3,)


@given(POSITIVE, st.floats(1.5, 1e9), st.integers(3, 9))
def test_log_ticks(low: float, factor: float, most: int) -> None:
    high = low * factor
    ticks = log_ticks(low, high, most)
    assert 1 <= len(ticks) <= most
    assert all(low * 0.999 <= t <= high * 1.001 for t in ticks)
    assert list(ticks) == sorted(ticks)


def test_an_axis_over_decades_is_logarithmic() -> None:
    assert scale_for([0.1, 30], 0, 100).log
    assert not scale_for([0.7, 2.0], 0, 100).log
    assert not scale_for([-1, 30], 0, 100).log
    assert log_ticks(0.1, 30, 6) == pytest.approx((0.1, 0.3, 1, 3, 10, 30))


@given(st.lists(POSITIVE, min_size=1, max_size=20), st.sampled_from([True, False, None]))
def test_all_values_lie_on_the_axis(values: list[float], log: bool | None) -> None:
    scale = scale_for(values, 10, 110, log=log)
    for value in values:
        assert -1e-9 <= scale.share(value) <= 1 + 1e-9
        assert 10 <= scale(value) <= 110


def test_values_outside_land_on_the_edge() -> None:
    scale = Scale(0, 10, 100, 0)
    assert (scale(-5), scale(5), scale(99)) == (100, 50, 0)
    assert Scale(1, 100, 0, 1, log=True)(-3) == 0


@given(VALUES, st.floats(1e-3, 1e6), st.integers(3, 9))
def test_labels_tell_ticks_apart(low: float, length: float, most: int) -> None:
    ticks = nice_ticks(low, low + length, most)
    labels = tick_labels(ticks)
    if max(map(abs, ticks), default=0) < 1e5:
        assert len(set(labels)) == len(ticks)
    for tick, label in zip(ticks, labels, strict=True):
        assert math.isclose(float(label.replace("\u2212", "-")), tick, rel_tol=0.01, abs_tol=1e-9 + length * 1e-3)


def test_labels_have_the_same_decimals() -> None:
    assert tick_labels((0.0, 2.5, 5.0)) == ("0", "2.5", "5.0")
    assert tick_labels((-1.0, 0.0, 1.0)) == ("\u22121", "0", "1")
    assert tick_labels((0.1, 1.0, 10.0)) == ("0.1", "1", "10")
