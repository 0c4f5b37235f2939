from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeq.calibration import statistics
from edgeq.calibration.statistics import CHUNK, EMPTY, Counter, Histogram, histogram_of, is_sound
from edgeq.errors import CalibrationError

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = hnp.arrays(np.float32, st.integers(0, 60), elements=floats)


@given(arrays)
def test_every_value_lies_in_its_bin_and_is_counted_once(values: np.ndarray) -> None:
    histogram = histogram_of(values)
    lower, upper = histogram.edges()
    assert is_sound(histogram)
    assert histogram.total == values.size
    assert (np.diff(lower) > 0).all()
    for value in values.astype(np.float64):
        # Bins exclude their outer end, so a value is inside exactly one bin. Zero's bin extends to both sides.
        inside = np.where(lower >= 0, (lower <= value) & (value < upper), (lower < value) & (value <= upper))
        assert inside.sum() == 1


@given(arrays, arrays, arrays)
def test_merging_is_associative_commutative_and_the_same_as_counting_together(
    a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> None:
    x, y, z = histogram_of(a), histogram_of(b), histogram_of(c)
    assert x.merge(y).merge(z) == x.merge(y.merge(z))
    assert x.merge(y) == y.merge(x)
    assert x.merge(EMPTY) == x
    assert x.merge(y).merge(z) == histogram_of(np.concatenate([a, b, c]))


@given(arrays, floats, floats)
def test_clipping_the_histogram_is_counting_the_clipped_values(values: np.ndarray, a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    assert histogram_of(values).clip(low, high) == histogram_of(np.clip(values, np.float32(low), np.float32(high)))
    assert histogram_of(values).clip(0.0, float("inf")) == histogram_of(np.maximum(values, np.float32(0)))


@given(arrays)
def test_the_counter_counts_as_the_plain_way_does(values: np.ndarray) -> None:
    counter = Counter()
    for part in (values[:7], values[7:]):
        counter.add(np.ascontiguousarray(part))
    if values.size:
        assert counter.freeze(float(values.min()), float(values.max())) == histogram_of(values)


def test_a_counter_continues_a_histogram() -> None:
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    counter = Counter(histogram_of(values[:500]))
    counter.add(values[500:])
    assert counter.freeze(float(values.min()), float(values.max())) == histogram_of(values)


def test_few_values_need_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    zeros = statistics._zeros
    monkeypatch.setattr(statistics, "_zeros", lambda: (made.append(1), zeros())[1])
    values = np.random.default_rng(0).normal(size=2 * CHUNK).astype(np.float32)
    counter = Counter()
    for end in (0, 5, 2000, CHUNK):
        counter.add(values[counter.freeze(-9.0, 9.0).total : end], weight=1)
        assert counter.freeze(-9.0, 9.0) == histogram_of(values[:end])
    assert not made
    counter.add(values[CHUNK:])
    assert counter.freeze(-9.0, 9.0) == histogram_of(values)
    assert len(made) == 1


def test_a_counter_does_not_overflow() -> None:
    counter, values = Counter(), np.float32([1.0, 1.0, -2.0])
    for _ in range(4):
        counter.add(values, weight=2**30)
    frozen = counter.freeze(-2.0, 1.0)
    assert frozen.counts.tolist() == [2**32, 2**33]
    assert counter.freeze(-2.0, 1.0) == frozen


def test_a_counter_takes_histograms() -> None:
    values = np.random.default_rng(0).normal(size=60_000).astype(np.float32)
    values[:100] = 0
    parts = [histogram_of(part) for part in np.split(values, [7, 20_000, 20_300, 50_000])]
    counter = Counter(histogram_of(values[:500]))
    for part in parts:
        counter.take(part)
    counter.add(values[:500])
    counted = np.concatenate([values[:500], values, values[:500]])
    assert counter.freeze(float(values.min()), float(values.max())) == histogram_of(counted)


def test_a_counter_that_takes_histograms_does_not_overflow() -> None:
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    one = histogram_of(values)
    large = Histogram(one.keys, one.counts * 100_000)
    larger = Histogram(one.keys, one.counts * 2**32)
    counter = Counter()
    for part in (large, large, large, larger, one):
        counter.take(part)
    assert counter.freeze(-9.0, 9.0) == Histogram(one.keys, one.counts * (300_001 + 2**32))


def test_bins_have_a_relative_width_of_at_most_a_thousandth() -> None:
    lower, upper = histogram_of(np.float32([-3.7, -1e-20, 1.0, 1.999, 5e30])).edges()
    assert ((upper - lower) / np.minimum(np.abs(lower), np.abs(upper)) <= 1 / 1024).all()


def test_float16_values_have_a_bin_each() -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    assert histogram_of(values).keys.size == values.size - 1  # both zeros share a bin


def test_a_counter_takes_parts_of_any_size_stride_and_weight() -> None:
    values = np.random.default_rng(1).normal(size=3 * CHUNK).astype(np.float32)
    counter = Counter()
    for begin in range(0, values.size, CHUNK):
        counter.add(values[begin : begin + CHUNK])
    counter.add(values[: CHUNK // 2])
    counter.add(values[:CHUNK:3], weight=2)
    counter.add(values[:1000:7], weight=2)
    counted = np.concatenate([values, values[: CHUNK // 2], *[values[:CHUNK:3], values[:1000:7]] * 2])
    assert counter.freeze(float(values.min()), float(values.max())) == histogram_of(counted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        histogram_of(np.float32([1.0, bad]))


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        ([5, 5], [1, 1]),
        ([6, 5], [1, 1]),
        ([5], [0]),
        ([5], [-1]),
        ([5], [1, 1]),
        ([statistics.KEYS], [1]),
        ([255 << 10], [1]),
        ([statistics.KEYS // 2], [1]),
    ],
)
def test_unsound_histograms_are_reported(keys: list[int], counts: list[int]) -> None:
    assert not is_sound(Histogram(np.array(keys, np.uint32), np.array(counts, np.int64)))


@pytest.mark.parametrize("factor", [1, 300, 2**33])
def test_a_histogram_is_the_same_behind_a_pickle(factor: int) -> None:
    one = histogram_of(np.random.default_rng(3).normal(size=1000).astype(np.float32))
    sent = Histogram(one.keys, one.counts * factor)
    back = pickle.loads(pickle.dumps(sent))
    assert back == sent
    assert (back.keys.dtype, back.counts.dtype) == (np.uint32, np.int64)
    assert pickle.loads(pickle.dumps(EMPTY)) == EMPTY
    if factor == 1:
        assert len(pickle.dumps(sent)) < sent.keys.nbytes + sent.counts.nbytes // 4
