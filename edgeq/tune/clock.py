"""Where a search measures time: on this machine, or on a board (`edgeq.remote.clock`). What is built and what it costs
in accuracy is found here in both cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from edgeq_device.latency import warm_up_all
from edgeq_device.ranking import RaceRules, Ranking, rank_until_settled
from edgeq_device.scenarios import query_runner

from edgeq.measure.latency import session_memory
from edgeq.session import SessionSettings, open_session
from edgeq.tune.sessions import SessionPool

T = TypeVar("T")
Model = tuple[Path, SessionSettings]
Feed = Mapping[str, Any]


class Clock(Protocol):
    """Times models where they are to run."""

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> T | None:
        """What `judge` finds of a session on that machine; None where that is this machine, and nothing is opened."""

    def race(self, models: Mapping[str, Model], feed: Feed, rules: RaceRules, on_round: Callable[[], None]) -> Ranking:
        """`rank_until_settled` by `rules`."""

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """A session under the profiler, whose files lie where the settings say when it has ended."""

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """Peak memory of a session, bytes."""


class LocalClock:
    """This machine."""

    def __init__(self, sessions: SessionPool) -> None:
        self._sessions = sessions
        self._warm: WeakSet[Any] = WeakSet()

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> None:
        """See `Clock.answers`."""
        del model, settings, judge

    def race(self, models: Mapping[str, Model], feed: Feed, rules: RaceRules, on_round: Callable[[], None]) -> Ranking:
        """See `Clock.race`. Sessions that an earlier race has warmed up are not warmed up again."""
        seconds = rules.how["max_duration_s"] / len(models)  # opening takes no longer than the race
        opened = {name: self._sessions.sessions(*model, rules.sessions, seconds) for name, model in models.items()}
        cold = [[session for session in each if session not in self._warm] for each in opened.values()]
        warm_up_all([_runners(each, feed) for each in cold if each], rules.warmup, perf_counter)
        self._warm.update(itertools.chain(*cold))
        runners = {name: _runners(each, feed) for name, each in opened.items()}
        ranking = rank_until_settled(runners, bursts=rules.bursts, on_round=on_round, **rules.how)
        self._sessions.trim()
        return ranking

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """See `Clock.open_profiled`."""
        return open_session(model, settings)

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """See `Clock.peak_memory`; in a process of its own."""
        return session_memory(model, settings, shapes).session_peak_bytes


def _runners(sessions: Sequence[Any], feed: Feed) -> list[Callable[[], object]]:
    return [query_runner(session, [feed]) for session in sessions]
