"""Implement `edgeq tune --on`: speed comparisons, self-tests and profiles on boards of one kind.

If a board fails, edgeq continues with the other boards, if any are left. If a board throttles because of heat, edgeq
lets it rest once. If it throttles again, edgeq leaves it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from edgeq_device.measure.claim import RaceRules, SpeedRanking
from edgeq_device.measure.latency import Distribution
from msgspec import Meta

from edgeq.emulate.routes import NATIVE, ExecutionRoute, Running
from edgeq.errors import BoardError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import Installed
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.measure.coverage import ArtifactCheck
from edgeq.model.load import model_bytes
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.link import Text
from edgeq.remote.machine import Description, check_graph, describe_board, kernel_events
from edgeq.remote.session import SENSELESS, BoardGuest, BoardModels, BoardSession, open_board, senseless
from edgeq.run.session import SessionSettings, open_request, with_carried
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Count, Share, parse

T = TypeVar("T")
_Model = tuple[Path, SessionSettings]
COOL_S = 60.0
"""Seconds that a board rests after throttling, before its measurement is repeated."""


@dataclass(frozen=True)
class _Ready:
    session: BoardSession
    models: BoardModels
    found: Description


class BoardClock:
    """Time models on boards of one kind. The boards take turns, so that one rests while another works.

    See `edgeq.tuning.sessions.Clock`.
    """

    def __init__(
        self, boards: Sequence[Board], *, progress: Progress = SILENT, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._boards = boards
        self._progress = progress
        self._sleep = sleep
        self._stack = ExitStack()
        self._ready: list[_Ready] = []
        self._used: dict[str, Description] = {}

    def __enter__(self) -> Self:
        try:
            for board in self._boards:
                session = self._stack.enter_context(open_board(board))
                session.require("numpy", "onnxruntime")
                models = self._stack.enter_context(BoardModels(session, self._progress))
                self._ready.append(_Ready(session, models, describe_board(session)))
            self._check_same()
            self._first = self._ready[0].found
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def machine(self) -> Machine:
        """Return the first board's machine, as the board describes it."""
        return self._first.machine

    @property
    def engines(self) -> Mapping[str, Installed]:
        """Return the engines that the first board has, by name."""
        return self._first.engines

    @property
    def route(self) -> ExecutionRoute:
        """Return how the boards run models under the profiler."""
        where = f"{', '.join(board.name for board in self._boards)}, over SSH"

        @contextmanager
        def running() -> Iterator[Running]:
            yield Running(self.open_profiled, None)

        return ExecutionRoute(NATIVE, where, native_speed=True, start=running)

    def checks(self) -> tuple[ArtifactCheck, ...]:
        """Return the checks that each built candidate has passed on a board."""
        return tuple(ArtifactCheck(name, "native", self.route.how, "", True) for name in ("load", "self-test"))

    def record(self) -> dict[str, Any]:
        """Return the boards that were used, by name. Each entry has the board's machine and its state at the start."""
        return {name: {"machine": found.machine, "state": found.state} for name, found in self._used.items()}

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> T:
        """Open a session on a board and return the result of `judge` for it. See `Clock.answers`."""

        def run(ready: _Ready) -> T:
            session = ready.models.open(model, settings)
            found = judge(session)
            session.close()
            return found

        return self.on_one(run)

    def race(
        self, models: Mapping[str, _Model], feed: Mapping[str, Any], rules: RaceRules, on_round: Callable[[], None]
    ) -> SpeedRanking:
        """Compare the speed of all models on one board. See `Clock.race`."""

        def run(ready: _Ready) -> SpeedRanking:
            requests = [
                {
                    **open_request(ready.session.send_model(model, how.engine), with_carried(model, how)),
                    "name": name,
                }
                for name, (model, how) in models.items()
            ]
            request = {"do": "race", "models": requests, "feed": ready.session.send_samples([feed])[0], **asdict(rules)}
            guest = ready.models.guest()
            # allow as much time for opening the models as for the comparison itself
            guest.request_s = link.REQUEST_S + 2 * rules.how["max_duration_s"]
            found = _ranking(ready.session, *guest.exchange(request))
            if found.distributions.keys() != models.keys():
                raise senseless(ready.session)
            on_round()
            return found

        return self.on_one(lambda ready: self._undisturbed(ready, run))

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """Return a session under the profiler on a board. See `Clock.open_profiled`."""
        return _Profiled(self, model, settings)

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """Return the peak memory of a session on a board. See `Clock.peak_memory`."""

        def run(ready: _Ready) -> int:
            opened = open_request(ready.session.send_model(model, settings.engine), settings)
            request = {"do": "peak", **opened, "shapes": dict(shapes)}
            reply, _ = ready.models.guest().exchange(request)
            return parse(reply, _Peak, ready.session.board.name, BoardError).session_peak_bytes

        return self.on_one(run)

    def on_one(self, run: Callable[[_Ready], T]) -> T:
        """Call `run` for the next board in turn. If that fails, drop the board and try the next one."""
        while True:
            ready = self._ready[0]
            self._ready.append(self._ready.pop(0))
            try:
                done = run(ready)
            except BoardError as error:
                self._ready.remove(ready)
                if not self._ready:
                    raise
                self._progress.note(f"{error.text}: continuing without this board")
                continue
            self._used[ready.session.board.name] = ready.found
            return done

    def _undisturbed(self, ready: _Ready, run: Callable[[_Ready], T]) -> T:
        """Call `run` for a board. If the board throttled during the call, let it rest and call `run` once more."""
        name = ready.session.board.name
        for rest in (True, False):
            before = describe_board(ready.session).state.thermal_throttles
            done = run(ready)
            after = describe_board(ready.session).state.thermal_throttles
            if before is None or after is None or after <= before:
                return done
            if rest:
                self._progress.note(f"{name} throttled for heat during a race: it rests for {COOL_S:g} s")
                self._sleep(COOL_S)
        raise BoardError(f"{name} throttles for heat again after a rest", "Cool it, then continue with --resume")

    def _check_same(self) -> None:
        profiles = load_profiles()
        kinds = {
            (match_profile(r.found.machine, profiles).profile.name, r.found.machine.cpu_name): r.session.board.name
            for r in self._ready
        }
        if len(kinds) > 1:
            named = ", ".join(f"{board} is {cpu or profile}" for (profile, cpu), board in kinds.items())
            raise UsageError(f"the boards are of different kinds: {named}", "Tune for each kind separately")


class _Profiled:
    """Act as a session under the profiler on a board.

    The board runs all inputs when profiling ends. So another board can repeat them if the first one fails.
    """

    def __init__(self, clock: BoardClock, model: Path, settings: SessionSettings) -> None:
        self._clock, self._model, self._settings = clock, model, settings
        self._feeds: list[Mapping[str, Any]] = []

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Store an input for the board. Unlike onnxruntime's method, this returns no outputs, because callers need
        none.
        """
        del names
        self._feeds.append(feed)
        return []

    def end_profiling(self) -> str:
        """Run the stored inputs on a board, and return the path of the profile on this machine."""
        return self._clock.on_one(self._profile)

    def _profile(self, ready: _Ready) -> str:
        prefix, optimized = self._settings.profile_prefix, self._settings.save_optimized_to
        assert prefix is not None
        assert optimized is not None
        guest, folder = ready.models.guest(), f"{ready.session.hello.folder}/tmp"
        request = open_request(ready.session.send_model(self._model), with_carried(self._model, self._settings))
        session = guest.opened({**request, "profile": [f"{folder}/{prefix.name}", f"{folder}/{optimized.name}"]})
        for feed in self._feeds:
            session.run(None, feed)
        here = prefix.with_name(f"{prefix.name}.json")
        try:
            here.write_bytes(kernel_events(_read(guest, session.end_profiling())))
            graph = _read(guest, f"{folder}/{optimized.name}")
            check_graph(graph, model_bytes(self._model))
            optimized.write_bytes(graph)
        except (KeyError, ValueError) as error:
            raise senseless(ready.session) from error
        session.close()
        return str(here)


def _read(guest: BoardGuest, file: str) -> bytes:
    _, arrays = guest.exchange({"do": "read", "file": file})
    return arrays["content"].tobytes()


@dataclass(frozen=True)
class _Raced:
    """Describe one model in a board's comparison of speeds. The names of its arrays begin with `index`."""

    index: Count
    samples_per_query: Annotated[int, Meta(ge=1, le=1 << 20)]
    elapsed_s: Annotated[float, Meta(ge=0, le=1e6)]
    busy: Share
    sessions: Annotated[int, Meta(ge=1, le=1 << 10)]
    stolen: Share


@dataclass(frozen=True)
class _Race:
    """Describe a board's answer to a comparison of speeds. See `edgeq_device.measure.claim.SpeedRanking`."""

    order: tuple[Text, ...]
    settled: bool
    ties: tuple[tuple[Text, Text], ...]
    rounds: Count
    runners: Mapping[Text, _Raced]


@dataclass(frozen=True)
class _Peak:
    session_peak_bytes: Count


def _ranking(session: BoardSession, answer: Mapping[str, Any], arrays: Mapping[str, Any]) -> SpeedRanking:
    """Return the ranking of the models whose speed a board compared."""
    found = parse(answer, _Race, session.board.name, BoardError)
    try:
        distributions = {}
        for name, one in found.runners.items():
            samples, rounds, disturbed = (arrays[f"{one.index} {key}"] for key in ("samples_ms", "rounds", "disturbed"))
            figures = one.samples_per_query, one.elapsed_s, disturbed, one.busy, one.sessions, one.stolen
            distributions[name] = Distribution(samples, rounds, *figures)
        tied = {name for pair in found.ties for name in pair}
        if sorted(found.order) != sorted(distributions) or not tied <= {*found.order}:
            raise ValueError("an order of other models")
        return SpeedRanking(found.order, found.settled, found.ties, found.rounds, distributions)
    except (*SENSELESS, ValueError) as error:
        raise senseless(session) from error
