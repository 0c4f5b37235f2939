"""Keep the sessions of a search from one stage to the next, because an engine may take seconds to compile a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from edgeq_device.measure.claim import FEWEST_SESSIONS, RaceRules, SettlingRules, SpeedRanking, rank_until_settled
from edgeq_device.measure.latency import warm_up_all
from edgeq_device.measure.scenarios import query_runner

from edgeq.backends.base import Artifact
from edgeq.measure.latency import session_memory
from edgeq.model.load import model_bytes
from edgeq.run.session import Engines, SessionSettings, open_session

MEMORY = 2**30
"""Approximate limit, in bytes, for the sessions that stay open while unused. Samples in memory have the same limit."""
_BESIDE_WEIGHTS = 2**23


class SessionPool:
    """Open sessions, and reuse sessions that are already open. Each session of a file is in a process of its own.

    Args:
        engines: opens the sessions.
        memory: approximate number of bytes of the sessions that `trim` leaves open.
    """

    def __init__(self, engines: Engines, memory: int = MEMORY) -> None:
        self._engines = engines
        self._memory = memory
        self._open: dict[str, list[Any]] = {}  # the most recently used session is last
        self._bytes: dict[str, int] = {}
        self._opened_in_s: dict[str, float] = {}

    def sessions(
        self, model: Path, settings: SessionSettings, count: int = 1, seconds: float = float("inf")
    ) -> list[Any]:
        """Return sessions of a file. The sessions stay open at least until the next `trim`.

        Args:
            count: number of sessions.
            seconds: time for opening. If it is too short, fewer sessions are returned, but at least one.
        """
        key = f"{model} {settings!r}"
        found = self._open[key] = self._open.pop(key, [])
        start = now = time.perf_counter()
        while len(found) < count and (not found or now - start + self._opened_in_s[key] <= seconds):
            found.append(self._engines.open(model, settings, len(found)))
            self._opened_in_s[key] = time.perf_counter() - now
            now = time.perf_counter()
        if key not in self._bytes:
            self._bytes[key] = model_bytes(model) + _BESIDE_WEIGHTS
        return found[:count]

    def trim(self) -> None:
        """Close sessions until the rest fits into the memory. Sessions that have not been used for longest are closed
        first.
        """
        taken = sum(self._bytes[key] * len(found) for key, found in self._open.items())
        for key in list(self._open):
            if taken <= self._memory:
                return
            taken -= self._bytes[key] * len(self._open[key])
            for session in self._open.pop(key):
                _close(session)


@contextmanager
def opened(engines: Engines, model: Path, settings: SessionSettings) -> Iterator[Any]:
    """Open a session for one use, and close it afterwards."""
    session = engines.open(model, settings)
    try:
        yield session
    finally:
        _close(session)


def judged(artifact: Artifact) -> tuple[Path, SessionSettings]:
    """Return the model and the settings that represent an artifact when its outputs are judged.

    If the artifact's engine is a simulator, return the Q/DQ model as written, to run without the engine. The simulator
    would take a thousand times as long, and its results differ only by roundings: see `edgeq.tuning.judge`.
    """
    if artifact.in_simulator:
        return artifact.model, SessionSettings(optimization="none")
    return artifact.proof_model, artifact.proof_settings()


def _close(session: Any) -> None:
    """Free the memory of a session in another process. A session in this process is freed with its last reference."""
    guest = getattr(session, "guest", None)
    if guest is not None and not guest.ended:
        session.close()


T = TypeVar("T")
Model = tuple[Path, SessionSettings]
Feed = Mapping[str, Any]


class Clock(Protocol):
    """Time models on the machine where they are meant to run."""

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> T | None:
        """Return the result of `judge` for a session on that machine. If it is this machine, open nothing and return
        None.
        """

    def race(
        self, models: Mapping[str, Model], feed: Feed, rules: RaceRules, on_round: Callable[[], None]
    ) -> SpeedRanking:
        """Run `rank_until_settled` with the settings in `rules`."""

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """Return a session that runs under the profiler. After the session has ended, the profiler's files are in the
        place that the settings specify.
        """

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """Return the peak memory of a session in bytes."""


class LocalClock:
    """Time models on this machine."""

    def __init__(self, sessions: SessionPool) -> None:
        self._sessions = sessions
        self._warm: WeakSet[Any] = WeakSet()

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> None:
        """See `Clock.answers`."""
        del model, settings, judge

    def race(
        self, models: Mapping[str, Model], feed: Feed, rules: RaceRules, on_round: Callable[[], None]
    ) -> SpeedRanking:
        """See `Clock.race`. Sessions that an earlier race has warmed up are not warmed up again.

        The seconds in `rules` include the opening of the sessions and the warm-up. At least half of them are left for
        the race.
        """
        start, whole_s = perf_counter(), rules.how["max_duration_s"]
        seconds = whole_s / 3 / len(models)
        found = [len(self._sessions.sessions(*model, rules.sessions, seconds)) for model in models.values()]
        # Claims compare sessions in pairs, and fewer sessions would not show how processes differ.
        count = max(min(found), min(rules.sessions, FEWEST_SESSIONS))
        opened = {name: self._sessions.sessions(*model, count) for name, model in models.items()}
        cold = [[session for session in each if session not in self._warm] for each in opened.values()]
        warm_up_all([_runners(each, feed) for each in cold if each], rules.warmup, perf_counter)
        self._warm.update(itertools.chain(*cold))
        runners = {name: _runners(each, feed) for name, each in opened.items()}
        left_s = max(whole_s / 2, whole_s - (perf_counter() - start))
        settling = SettlingRules(**{**rules.how, "max_duration_s": left_s})
        ranking = rank_until_settled(runners, settling, bursts=rules.bursts, on_round=on_round)
        self._sessions.trim()
        return ranking

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """See `Clock.open_profiled`."""
        return open_session(model, settings)

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """See `Clock.peak_memory`. The session runs in a separate process."""
        return session_memory(model, settings, shapes).session_peak_bytes


def _runners(sessions: Sequence[Any], feed: Feed) -> list[Callable[[], object]]:
    return [query_runner(session, [feed]) for session in sessions]
