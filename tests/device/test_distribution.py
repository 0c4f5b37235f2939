from __future__ import annotations

import math

import numpy as np
import pytest
from edgeq_device.measure.latency import Distribution, histogram, percentile, shared_edges, sparkline
from hypothesis import given
from hypothesis import strategies as st

latencies = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300)


def test_percentiles_are_observed_latencies_at_mlperfs_positions() -> None:
    d = Distribution(np.arange(1, 1001, dtype=float)[::-1])
    assert (d.p50, d.to_dict()["p90_ms"], d.p99, d.p999) == (501.0, 901.0, 991.0, 1000.0)


@pytest.mark.parametrize(
    ("n", "fraction", "position"), [(100, 0.07, 7), (100, 0.29, 29), (100, 0.99, 99), (10, 0.9, 9)]
)
def test_rounding_errors_do_not_move_a_percentile(n: int, fraction: float, position: int) -> None:
    assert percentile(np.arange(n, dtype=float), fraction) == position


@given(latencies, st.sampled_from([0.5, 0.9, 0.99, 0.999]))
def test_a_percentile_is_at_least_as_large_as_its_share_of_the_others(values: list[float], fraction: float) -> None:
    ordered = np.sort(np.array(values))
    p = percentile(ordered, fraction)
    assert p in ordered
    assert np.count_nonzero(ordered <= p) >= math.floor(fraction * len(values))
    assert percentile(ordered, 0.5) <= percentile(ordered, 0.9) <= ordered[-1]


def test_no_latencies_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no latencies"):
        percentile(np.empty(0), 0.5)


def test_figures_and_their_names() -> None:
    d = Distribution(np.array([1.0, 2.0, 3.0, 6.0]), samples_per_query=8)
    assert d.to_dict() == {
        "count": 4,
        "min_ms": 1.0,
        "p50_ms": 3.0,
        "p90_ms": 6.0,
        "p99_ms": 6.0,
        "p999_ms": 6.0,
        "max_ms": 6.0,
        "mean_ms": 3.0,
        "cv": pytest.approx(math.sqrt(3.5) / 3),
        "samples_per_s": pytest.approx(8 * 4 / 0.012),
    }


def test_throughput_refers_to_the_wall_clock_where_it_is_known() -> None:
    assert Distribution(np.array([1.0, 1.0]), elapsed_s=0.5).to_dict()["samples_per_s"] == 4.0


def test_a_single_latency_of_zero_has_finite_figures() -> None:
    d = Distribution(np.array([0.0]))
    figures = d.to_dict()
    assert (figures["cv"], figures["samples_per_s"], d.p999) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [1.0, float("inf")], [-1.0], [[1.0]]])
def test_refuses_values_that_are_not_latencies(bad: list[float]) -> None:
    with pytest.raises(ValueError):
        Distribution(np.array(bad))


@pytest.mark.parametrize("rounds", [[1], [0, 0], [0, 3], [0, 2, 1]])
def test_rounds_must_rise_within_the_latencies(rounds: list[int]) -> None:
    with pytest.raises(ValueError, match="rounds"):
        Distribution(np.ones(3), np.array(rounds))


def test_round_medians() -> None:
    samples = np.array([1.0, 9.0, 2.0, 5.0, 3.0, 4.0])
    assert Distribution(samples, np.array([0, 3, 4])).round_medians().tolist() == [2.0, 5.0, 3.5]
    assert Distribution(np.array([3.0, 1.0])).round_medians().tolist() == [3.0, 1.0]


@given(latencies, latencies)
def test_histograms_share_their_edges_and_lose_nothing(a: list[float], b: list[float]) -> None:
    both = [Distribution(np.array(a)), Distribution(np.array(b))]
    edges = shared_edges(both)
    assert np.all(np.diff(edges) > 0)
    assert [sum(histogram(d, edges)) for d in both] == [len(a), len(b)]


def test_sparkline_shows_rare_bins() -> None:
    assert sparkline([0, 1, 1000, 500]) == " ▁█▄"
    assert sparkline([0, 0]) == "  "
