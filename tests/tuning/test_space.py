"""Test which candidates are tried, and which are left out because they make no sense."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from edgeq.hardware.profile import load_profiles
from edgeq.scheme import Scheme
from edgeq.tuning.space import Candidate, kernel_candidates, method_candidates, thread_counts
from edgeq.util.records import plain
from tests.tuning.fakes import profile


def names(candidates: tuple[Candidate, ...]) -> list[str]:
    return [c.name for c in candidates]


def test_the_profile_itself_comes_first() -> None:
    for one in load_profiles().values():
        first = kernel_candidates(one)[0]
        assert plain(first.scheme) == plain(one.scheme), one.name


def test_every_shipped_profile_has_a_small_space_of_distinct_names() -> None:
    for one in load_profiles().values():
        kernels = kernel_candidates(one, dynamic=True)
        everything = [*kernels, *itertools.chain.from_iterable(method_candidates(k, one) for k in kernels)]
        assert len({c.name for c in everything}) == len(everything), one.name
        assert len({repr(plain(c.scheme)) for c in everything}) == len(everything), one.name
        assert len(kernels) <= 20, (one.name, names(kernels))


def test_a_mitigation_only_where_something_saturates() -> None:
    search = {"reduce_range": [True, False], "weight_type": ["int8", "uint8"], "per_channel": [True]}
    safe = dataclasses.replace(profile(**search), scheme=Scheme(reduce_range=True))
    saturating = dataclasses.replace(safe, hazards={"saturates_int16": ["U8S8"]})
    assert names(kernel_candidates(saturating)) == [
        "U8S8 per-channel 7-bit, minmax",
        "U8S8 per-channel, minmax",
        "U8U8 per-channel, minmax",
    ]
    assert names(kernel_candidates(safe)) == ["U8S8 per-channel 7-bit, minmax", "U8U8 per-channel, minmax"]


def test_one_mitigation_at_a_time() -> None:
    search = {
        "fit_pairs": [True, False],
        "reduce_range": [True, False],
        "session_options": {"session.x64quantprecision": ["0", "1"]},
    }
    one = profile(**search)
    saturating = dataclasses.replace(one, hazards={"saturates_int16": ["U8S8"]})
    schemes = [c.scheme for c in kernel_candidates(saturating)]
    assert len(schemes) == 4
    assert all(s.reduce_range + s.fit_pairs + bool(s.session_options) <= 1 for s in schemes)
    assert not any(c.scheme.fit_pairs for c in kernel_candidates(one))
    assert {"session.x64quantprecision": "1"} in [dict(s.session_options) for s in schemes]


def test_methods_with_their_parameters() -> None:
    one = profile(method=["minmax", "percentile", "mse"])
    made = method_candidates(kernel_candidates(one)[0], one)
    assert names(made) == [
        "U8S8 per-channel, percentile 99.999",
        "U8S8 per-channel, percentile 99.99",
        "U8S8 per-channel, percentile 99.9",
        "U8S8 per-channel, mse",
    ]
    assert made[0].scheme.method_options == {"percentile": 99.999}


def test_dynamic_candidates_only_where_they_are_wanted_and_without_methods() -> None:
    one = dataclasses.replace(
        profile(method=["minmax", "mse"], per_channel=[True, False]),
        scheme=Scheme(dynamic_weight_types={"MatMul": "int8"}),
    )
    assert not any(c.scheme.mode == "dynamic" for c in kernel_candidates(one))
    made = kernel_candidates(one, static=False, dynamic=True)
    assert names(made) == ["dynamic per-channel", "dynamic per-tensor"]
    assert method_candidates(made[0], one) == ()


@pytest.mark.parametrize(("cores", "counts"), [(0, (0,)), (1, (0,)), (2, (0, 1)), (4, (0, 2, 1)), (64, (0, 32, 1))])
def test_thread_counts(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts
