"""Test how numbers are written for readers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.util import numbers as figures


def plain(shown: str) -> str:
    return shown.replace("\u202f", " ").replace("\u2212", "-")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1234.5, "1230"),
        (-0.01234, "-0.0123"),
        (9.999, "10.00"),
    ],
)
def test_significant_digits(value: float, shown: str) -> None:
    assert plain(figures.significant(value)) == shown


@given(st.floats(1e-30, 1e30))
def test_significant_digits_are_close(value: float) -> None:
    shown = float(plain(figures.significant(value)))
    assert abs(shown - value) <= 0.0051 * value


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0421, "42.1 µs"), (0.421, "0.421 ms"), (42.1, "42.1 ms"), (1500, "1.50 s")]
)
def test_latency(value: float, shown: str) -> None:
    assert plain(figures.milliseconds(value)) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(17, "17.0 B"), (422_226, "422 kB"), (1e6, "1.00 MB"), (2.5e12, "2500 GB")]
)
def test_bytes(value: float, shown: str) -> None:
    assert plain(figures.size(value)) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "50.0 %"), (1.0, "100.0 %"), (0.99999, "99.9 %"), (0.00001, "<0.1 %"), (0.0, "0.0 %")],
)
def test_a_share_is_all_or_nothing_only_if_it_is(value: float, shown: str) -> None:
    assert plain(figures.share(value)) == shown


def test_metrics_and_their_differences() -> None:
    assert plain(figures.metric("top1", 0.5678)) == "56.78 %"
    assert plain(figures.metric("auc", 0.87654)) == "0.8765"
    assert plain(figures.difference("top1", -0.002)) == "-0.20 pt"
    assert plain(figures.difference("mAP50-95", 0.01)) == "+1.00 pt"
    assert plain(figures.difference("auc", 0.0)) == "0.0000"
    assert plain(figures.difference("top1", -0.00001)) == "0.00 pt"


def test_counts_and_factors() -> None:
    assert plain(figures.count(999)) == "999"
    assert plain(figures.count(22_390_016)) == "22.4 M"
    assert figures.times(2.096) == "2.10×"
    assert figures.times(1234.0) == "1230×"
