"""Test races on this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edgeq_device.measure.claim import RaceRules
from edgeq_device.measure.latency import Bursts, WarmUp

from edgeq import demo
from edgeq.run.session import Engines, SessionSettings
from edgeq.tuning import clock as clocks
from edgeq.tuning.sessions import SessionPool


def test_a_session_is_warmed_up_for_its_first_race_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []

    def warm_up_all(runners: Any, settings: WarmUp, _: Any) -> None:
        warmed.extend(len(runner) for runner in runners)
        assert settings == rules.warmup

    monkeypatch.setattr(clocks, "warm_up_all", warm_up_all)
    how = {"max_duration_s": 60.0, "max_rounds": 2, "min_rounds": 2}
    rules = RaceRules(2, WarmUp(max_s=0.1), Bursts(0.0, 0.0), how)
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:1]}
    model, other = ((demo.MODEL, SessionSettings(intra_op_threads=n)) for n in (1, 0))
    with Engines() as engines:
        timed = clocks.LocalClock(SessionPool(engines))
        for runners in ({"a": model}, {"a": model, "b": other}, {"b": other}):
            ranking = timed.race(runners, feed, rules, lambda: None)
            assert set(ranking.order) == set(runners)
    assert warmed == [2, 2]
