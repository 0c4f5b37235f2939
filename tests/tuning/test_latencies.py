"""Test `edgeq.tuning.local.build_race` on made-up latencies: six sessions of two rounds."""

from __future__ import annotations

import numpy as np
import pytest
from edgeq_device.measure.claim import SpeedRanking
from edgeq_device.measure.latency import Distribution

from edgeq.tuning.local import build_race

SESSIONS, ROUNDS = 6, 12


def _latencies(milliseconds: float) -> Distribution:
    """Return latencies with one run in each round."""
    samples = np.full(ROUNDS, milliseconds) * (1 + 1e-4 * np.arange(ROUNDS))
    return Distribution(samples, np.arange(ROUNDS), sessions=SESSIONS)


def test_latencies_are_kept_beside_those_of_float32() -> None:
    measured = {"float32": _latencies(2.0), "int8": _latencies(1.0)}
    found = build_race(SpeedRanking(("int8", "float32"), True, (), ROUNDS, measured), "float32", batch=4).timings
    assert found["int8"].share == pytest.approx(0.5, rel=1e-3)
    assert found["int8"].speedup is not None
    assert found["int8"].speedup.estimate == pytest.approx(2, rel=1e-3)
    own = measured["int8"]
    assert found["int8"].latency["samples_per_s"] == pytest.approx(4 * own.count / own.elapsed_s)
    assert (found["float32"].share, found["float32"].speedup) == (1.0, None)
