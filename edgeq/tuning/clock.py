"""Time models on the machine where they are meant to run: this one, or another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from edgeq_device.measure.claim import FEWEST_SESSIONS, RaceRules, SettlingRules, SpeedRanking, rank_until_settled
from edgeq_device.measure.latency import warm_up_all
from edgeq_device.measure.scenarios import make_runner

from edgeq.emulate.routes import ExecutionRoute
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed
from edgeq.measure.checks import ArtifactCheck
from edgeq.measure.timed_model import measure_session_memory
from edgeq.run.session import SessionSettings, open_session
from edgeq.tuning.sessions import SessionPool
from edgeq.util.registry import CLOCKS, Registry

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


class RemoteClock(Clock, Protocol):
    """Time models on another machine, which also checks the outputs of every candidate."""

    @property
    def machine(self) -> Machine:
        """Return that machine, as it describes itself."""

    @property
    def engines(self) -> Mapping[str, Installed]:
        """Return the engines that it has, by name."""

    @property
    def route(self) -> ExecutionRoute:
        """Return how it runs models under the profiler."""

    def checks(self) -> tuple[ArtifactCheck, ...]:
        """Return the checks that each built candidate has passed there."""

    def record(self) -> dict[str, Any]:
        """Return what was used for timing, by name, for the tuning record."""


REGISTRY: Registry[Callable[..., AbstractContextManager[RemoteClock]]] = Registry(CLOCKS, callable, "clock")


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
        start, whole_s = perf_counter(), rules.arguments["max_duration_s"]
        # Opening gets at most a third of the time, and each model the same part of it.
        seconds = whole_s / 3 / len(models)
        counts = [len(self._sessions.sessions(*model, rules.sessions, seconds)) for model in models.values()]
        # Claims compare sessions in pairs, and fewer sessions would not show how processes differ.
        count = max(min(counts), min(rules.sessions, FEWEST_SESSIONS))
        sessions = {name: self._sessions.sessions(*model, count) for name, model in models.items()}
        cold = [
            [session for session in model_sessions if session not in self._warm] for model_sessions in sessions.values()
        ]
        warm_up_all(
            [_runners(model_sessions, feed) for model_sessions in cold if model_sessions], rules.warmup, perf_counter
        )
        self._warm.update(itertools.chain(*cold))
        # All sessions are warm by now, because the runners of a race take turns from its first round.
        runners = {name: _runners(model_sessions, feed) for name, model_sessions in sessions.items()}
        left_s = max(whole_s / 2, whole_s - (perf_counter() - start))
        settling = SettlingRules(**{**rules.arguments, "max_duration_s": left_s})
        ranking = rank_until_settled(runners, settling, bursts=rules.bursts, on_round=on_round)
        self._sessions.trim()
        return ranking

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """See `Clock.open_profiled`."""
        return open_session(model, settings)

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """See `Clock.peak_memory`. The session runs in a separate process."""
        return measure_session_memory(model, settings, shapes).session_peak_bytes


def _runners(sessions: Sequence[Any], feed: Feed) -> list[Callable[[], object]]:
    return [make_runner(session, [feed]) for session in sessions]
