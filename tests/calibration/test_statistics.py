from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgeq.calibration.observer import Observer
from edgeq.calibration.statistics import Statistics, TensorStatistics, in_units, mean_of_units
from edgeq.errors import CalibrationError, UsageError

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
samples = st.lists(hnp.arrays(np.float32, (2, 3), elements=floats), min_size=0, max_size=4)


def tally(values: list[np.ndarray], axis: int | None = None) -> TensorStatistics:
    running = Observer(TensorStatistics(), axis)
    for array in values:
        running.observe(array)
    return running.freeze()


@given(samples, samples, samples)
def test_merging_is_associative_commutative_and_the_same_as_one_pass(
    a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]
) -> None:
    x, y, z = tally(a, 1), tally(b, 1), tally(c, 1)
    assert x.merge(y).merge(z) == x.merge(y.merge(z))
    assert x.merge(y) == y.merge(x)
    assert x.merge(y).merge(z) == tally([*a, *b, *c], 1)


@given(st.lists(floats, min_size=1, max_size=20))
def test_sums_of_extrema_are_exact(values: list[float]) -> None:
    total = sum(in_units(v) for v in values)
    assert Fraction(total) / 2**149 == sum(Fraction(v) for v in values)
    exact = float(sum(Fraction(v) for v in values) / len(values))
    assert mean_of_units(total, len(values)) == pytest.approx(exact, rel=1e-15, abs=0)


def shard(data: str, *, model: str = "m", name: str = "t", total: int = 0) -> Statistics:
    return Statistics(model, data, 1, {name: tally([np.float32([[1, 2, 3]])])}, total)


def test_whole_statistics_merge_in_any_order() -> None:
    a, b, c = shard("a"), shard("b"), shard("c")
    whole = a.merge(b).merge(c)
    assert whole == c.merge(a.merge(b)) == b.merge(c).merge(a)
    assert whole.data_digest == "a+b+c"
    assert whole.samples == 3
    assert whole.complete


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (shard("b", model="n"), "different models"),
        (shard("b", name="u"), "only in one"),
        (shard("a"), "same data"),
        (shard("b", total=2), "unfinished"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(other: Statistics, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        shard("a").merge(other)


def test_dtypes_and_channels_must_agree_and_the_tensor_is_named() -> None:
    half = replace(shard("b"), tensors={"t": tally([np.float16([[1]])])})
    with pytest.raises(CalibrationError, match="'t': one part has float32, the other float16"):
        shard("a").merge(half)
    with pytest.raises(CalibrationError, match="channels"):
        tally([np.zeros((1, 2), np.float32)], 1).merge(tally([np.zeros((1, 3), np.float32)], 1))
    with pytest.raises(CalibrationError, match="channel extrema"):
        tally([np.zeros((1, 2), np.float32)], 1).merge(tally([np.zeros((1, 2), np.float32)]))


def test_another_model_is_refused_by_name() -> None:
    with pytest.raises(CalibrationError, match=r"CAL.*another model"):
        shard("a", model="abc").check_model("def", "CAL")
    shard("a", model="abc").check_model("abc", "CAL")


def test_select_names_what_is_missing() -> None:
    assert list(shard("a").select(["t"]).tensors) == ["t"]
    with pytest.raises(UsageError, match="'u'"):
        shard("a").select(["u"])
