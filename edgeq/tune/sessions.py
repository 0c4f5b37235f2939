"""Sessions of a search, kept from one stage to the next: an engine may take seconds to compile a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from edgeq_device.claim import UNKNOWN, RaceRules, Ranking, rank_until_settled
from edgeq_device.latency import warm_up_all
from edgeq_device.scenarios import query_runner

from edgeq.backends.base import Artifact
from edgeq.measure.latency import session_memory
from edgeq.model.load import model_bytes
from edgeq.report.tuning_record import Timing
from edgeq.run.session import Engines, SessionSettings, open_session
from edgeq.tune.evaluator import FLOAT, Evaluator, Runner
from edgeq.tune.explain import Trial
from edgeq.tune.space import Candidate, engine_name
from edgeq.tune.trials import ROUGHLY, TIE, TrialTable

MEMORY = 2**30
"""Bytes that sessions which nobody uses may take, about."""
_BESIDE_WEIGHTS = 2**23


class SessionPool:
    """Opens sessions, and has those that were opened before.

    Args:
        engines: opens them.
        memory: bytes, about, that sessions take which stay open when `trim` is called.
    """

    def __init__(self, engines: Engines, memory: int = MEMORY) -> None:
        self._engines = engines
        self._memory = memory
        self._open: dict[str, list[Any]] = {}  # used last at the end
        self._bytes: dict[str, int] = {}
        self._opened_in_s: dict[str, float] = {}

    def sessions(
        self, model: Path, settings: SessionSettings, count: int = 1, seconds: float = float("inf")
    ) -> list[Any]:
        """Sessions of a file, which stay open until the next `trim` at least.

        Args:
            count: how many.
            seconds: no more than can be opened in this time, but one at least.
        """
        key = f"{model} {settings!r}"
        found = self._open[key] = self._open.pop(key, [])
        start = now = time.perf_counter()
        while len(found) < count and (not found or now - start + self._opened_in_s[key] <= seconds):
            found.append(self._engines.open(model, settings))
            self._opened_in_s[key] = time.perf_counter() - now
            now = time.perf_counter()
        if key not in self._bytes:
            self._bytes[key] = model_bytes(model) + _BESIDE_WEIGHTS
        return found[:count]

    def trim(self) -> None:
        """Close what was not used for longest, until the rest fits into the memory."""
        taken = sum(self._bytes[key] * len(found) for key, found in self._open.items())
        for key in list(self._open):
            if taken <= self._memory:
                return
            taken -= self._bytes[key] * len(self._open[key])
            for session in self._open.pop(key):
                _close(session)


@contextmanager
def opened(engines: Engines, model: Path, settings: SessionSettings) -> Iterator[Any]:
    """A session for one use."""
    session = engines.open(model, settings)
    try:
        yield session
    finally:
        _close(session)


def judged(artifact: Artifact) -> tuple[Path, SessionSettings]:
    """What is run to learn what an artifact answers. A simulator of its engine would take a thousand times as long as
    the Q/DQ model as it is written, from which it differs by roundings: see `edgeq.tune.decision`."""
    if artifact.in_simulator:
        return artifact.model, SessionSettings(optimization="none")
    return artifact.proof_model, artifact.proof_settings()


def _close(session: Any) -> None:
    """Give the memory of a session in another process back; one in this process goes with its last reference."""
    guest = getattr(session, "guest", None)
    if guest is not None and not guest.ended:
        session.close()


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


# One number suits beyond doubt what takes so many times as long with any other.
_CLEARLY = 1.5
_ANOTHER_SPEED = 1.15


@dataclass(frozen=True)
class Threads:
    """The number of threads that suits float32.

    Attributes:
        count: 0 is all cores.
        float_ms: median latency of float32 when it was chosen; 0 where there was no choice.
    """

    count: int = 0
    float_ms: float = 0.0

    def hold(self, float32: Timing) -> bool:
        """Whether `float32` still has about the speed that it had then. Two processors that begin to share a core, or
        cease to, make it another one, and other numbers of threads better."""
        if not self.float_ms:
            return True
        ratio = float32.latency["p50_ms"] / self.float_ms
        return max(ratio, 1 / ratio) <= _ANOTHER_SPEED


def choose_threads(
    table: TrialTable, trials: Sequence[Trial], evaluator: Evaluator, threads: Sequence[int], seconds: float, when: str
) -> Threads:
    """The threads that suit float32 best. The trials of each engine get those that suit the first of them best; more
    of them only where they pay. A plug-in's are not raced where one number clearly suits all that onnxruntime's own
    kernels run, unless the search is thorough. The first of `threads` where the machine is too busy to see what pays.

    Args:
        when: part of the runners' names, by which a journal distinguishes a later race of the same ones.
    """
    if len(threads) == 1:
        return Threads(threads[0])
    groups: dict[str, Candidate | None] = {FLOAT: None}
    for trial in sorted(trials, key=lambda t: t.candidate.engine is not None):
        groups.setdefault(_kind(trial), trial.candidate)
    best: dict[str, int] = {}
    medians: dict[int, float] = {}
    clear = not table.goal.thorough
    for kind, candidate in groups.items():
        if candidate is not None and candidate.engine is not None and clear and len(set(best.values())) == 1:
            best[kind] = best[FLOAT]
            continue
        # A race of their own: which number suits one kind says nothing about the order of the kinds.
        runners: dict[str, Runner] = {f"{kind} {n} {when}": (candidate, n) for n in threads}
        found = evaluator.time(runners, next(iter(runners)), tie=ROUGHLY, seconds=seconds / len(groups)).timings
        if any(timing.speedup is not None and timing.verdict == UNKNOWN for timing in found.values()):
            # What others leave of the cores now says nothing about the device at work: the choice stays the device's.
            return Threads(threads[0])
        latencies = {n: found[f"{kind} {n} {when}"].latency for n in threads}
        medians = medians or {n: latency["p50_ms"] for n, latency in latencies.items()}
        # Not the median: it hides the runs in which one thread waits for another on a core that is busy elsewhere.
        mean = {n: latency["mean_ms"] for n, latency in latencies.items()}
        fewest = [n for n in threads if mean[n] <= min(mean.values()) * (1 + TIE)]
        best[kind] = min(fewest, key=lambda n: n if n else float("inf"))
        clear = clear and min(mean[n] for n in threads if n != best[kind]) > _CLEARLY * mean[best[kind]]
    for trial in trials:
        table.update(trial.name, candidate=trial.candidate.replace(threads=best[_kind(trial)]))
    return Threads(best[FLOAT], medians[best[FLOAT]])


def _kind(trial: Trial) -> str:
    return engine_name(trial.candidate) if trial.candidate.engine else "int8"
