"""Test the sessions that a search keeps open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from edgeq_device.measure.claim import FEWEST_SESSIONS, RaceRules
from edgeq_device.measure.latency import Bursts, WarmUp

from edgeq.run.session import SessionSettings
from edgeq.tuning import clock as clocks
from edgeq.tuning import sessions as pools
from edgeq.tuning.clock import LocalClock
from edgeq.tuning.sessions import SessionPool
from tests.graphs import proto

ONE, ALL = SessionSettings(intra_op_threads=1), SessionSettings()


class Guest:
    def __init__(self) -> None:
        self.ended = False


class Session:
    def __init__(self, guest: Guest) -> None:
        self.guest, self.closed = guest, False

    def close(self) -> None:
        assert not self.guest.ended
        self.closed = True


class Opener:
    """Count the opened sessions. Each takes `seconds` of a made-up clock."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self.guest, self.opened = 0.0, Guest(), 0
        self.places: list[int] = []
        self._seconds = seconds

    def open(self, model: Path, settings: SessionSettings, place: int) -> Any:
        del model, settings
        self.places.append(place)
        self.now += self._seconds
        self.opened += 1
        return Session(self.guest)


def pool_of(opener: Opener, monkeypatch: Any, memory: int = 2**30) -> SessionPool:
    monkeypatch.setattr(pools.time, "perf_counter", lambda: opener.now)
    return SessionPool(opener, memory)  # type: ignore[arg-type]


def model(folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.save(proto("g (float[1] x) => (float[1] y) { y = Relu(x) }"), path)
    return path


def test_open_sessions_are_reused(tmp_path: Path, monkeypatch: Any) -> None:
    opener = Opener()
    pool = pool_of(opener, monkeypatch)
    first = pool.sessions(model(tmp_path), ALL, 2)
    assert pool.sessions(model(tmp_path), ALL, 3)[:2] == first
    assert opener.opened == 3
    assert pool.sessions(model(tmp_path), ALL) == first[:1]


def test_other_settings_and_other_files_are_others(tmp_path: Path, monkeypatch: Any) -> None:
    opener = Opener()
    pool = pool_of(opener, monkeypatch)
    asked = [(model(tmp_path), ALL), (model(tmp_path), ONE), (model(tmp_path, "other.onnx"), ALL)]
    assert len({id(pool.sessions(*one)[0]) for one in asked}) == opener.opened == 3


def test_no_more_than_can_be_opened_in_time_but_one(tmp_path: Path, monkeypatch: Any) -> None:
    opener = Opener(seconds=2.0)
    pool = pool_of(opener, monkeypatch)
    assert len(pool.sessions(model(tmp_path), ALL, 6, seconds=0.0)) == 1
    assert len(pool.sessions(model(tmp_path), ONE, 6, seconds=5.0)) == 2
    assert len(pool.sessions(model(tmp_path), ONE, 6, seconds=5.0)) == 4, "each time so many more"


def test_closes_the_least_recently_used_session_and_forgets_dead_ones(tmp_path: Path, monkeypatch: Any) -> None:
    opener = Opener()
    pool = pool_of(opener, monkeypatch, memory=2 * 2**23 + 2**20)
    old, new = (pool.sessions(model(tmp_path), settings, 1)[0] for settings in (ONE, ALL))
    pool.trim()
    assert not old.closed, "both fit"
    pool.sessions(model(tmp_path), ONE)
    pool.sessions(model(tmp_path, "third.onnx"), ONE)
    pool.trim()
    assert (old.closed, new.closed) == (False, True)
    opener.guest.ended = True
    pool.sessions(model(tmp_path, "fourth.onnx"), ONE)
    pool.trim()
    assert opener.opened == 4
    pool.sessions(model(tmp_path), ONE)
    assert opener.opened == 5, "it was forgotten"


@pytest.mark.parametrize(("each_s", "count"), [(0.0, 6), (9.0, FEWEST_SESSIONS)])
def test_all_models_of_a_race_have_the_same_number_of_sessions_and_enough_for_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_s: float, count: int
) -> None:
    opener = Opener(each_s)
    pool, raced = pool_of(opener, monkeypatch), dict[str, int]()
    monkeypatch.setattr(clocks, "make_runner", lambda session, feeds: lambda: None)
    monkeypatch.setattr(
        clocks,
        "rank_until_settled",
        lambda runners, rules, **how: raced.update({name: len(sessions) for name, sessions in runners.items()}),
    )
    pool.sessions(model(tmp_path), ALL, 5)
    models = {"a": (model(tmp_path), ALL), "b": (model(tmp_path, "b.onnx"), ALL)}
    rules = RaceRules(6, WarmUp(max_runs=2, min_s=0.0, max_s=0.0), Bursts(), {"max_duration_s": 6.0})
    LocalClock(pool).race(models, {}, rules, lambda: None)
    assert raced == {"a": count, "b": count}
    assert opener.places[:5] == [0, 1, 2, 3, 4], "each session is in a process of its own"
