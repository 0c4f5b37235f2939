"""`edgeq.tune.race` on latencies that are made up: six sessions of two rounds."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.claim import Ranking
from edgeq_device.latency import Distribution

from edgeq.tune.race import race_of

SESSIONS, ROUNDS = 6, 12


def _latencies(milliseconds: float, odd: float = 1.0) -> Distribution:
    """Of one run a round, `odd` times as long in one of the sessions."""
    samples = np.full(ROUNDS, milliseconds) * (1 + 1e-4 * np.arange(ROUNDS))
    samples[::SESSIONS] *= odd
    return Distribution(samples, np.arange(ROUNDS), sessions=SESSIONS)


@pytest.mark.parametrize(
    ("milliseconds", "odd", "tied"), [(1.0, 1.0, True), (1.04, 0.95, True), (1.3, 0.75, False), (1.3, 1.0, False)]
)
def test_what_is_in_doubt_is_tied_only_where_the_medians_are_close(milliseconds: float, odd: float, tied: bool) -> None:
    measured = {"float32": _latencies(2.0), "fast": _latencies(1.0), "other": _latencies(milliseconds, odd)}
    found = race_of(Ranking(("fast", "other", "float32"), True, (), ROUNDS, measured), "float32", batch=1)
    assert found.tied == (("fast", "other") if tied else ("fast",))


def test_latencies_are_kept_beside_those_of_float32() -> None:
    measured = {"float32": _latencies(2.0), "int8": _latencies(1.0)}
    found = race_of(Ranking(("int8", "float32"), True, (), ROUNDS, measured), "float32", batch=4).timings
    assert found["int8"].share == pytest.approx(0.5, rel=1e-3)
    assert found["int8"].speedup is not None
    assert found["int8"].speedup.estimate == pytest.approx(2, rel=1e-3)
    assert found["int8"].latency["samples_per_s"] == pytest.approx(4 * measured["int8"].throughput)
    assert (found["float32"].share, found["float32"].speedup) == (1.0, None)
