"""Implement `edgeq tune` with `on`: speed comparisons, self-tests and profiles on boards of one kind.

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
from edgeq.measure.checks import ArtifactCheck
from edgeq.model.files import model_bytes
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.link import Text
from edgeq.remote.machine import Description, describe_board
from edgeq.remote.profiled import check_graph, reduce_profile
from edgeq.remote.session import SENSELESS, BoardGuest, BoardModels, BoardSession, open_board, senseless_answer_error
from edgeq.run.session import SessionSettings, add_model_options, build_open_request
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
    description: Description


class BoardClock:
    """Time models on boards of one kind. The boards take turns, so that one rests while another works.

    See `edgeq.tuning.clock.Clock`.
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
            # All boards are of one kind, so the first one stands for all, even after it is dropped.
            self._reference = self._ready[0].description
        # The boards that are already held must be released, whatever interrupts the others.
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def machine(self) -> Machine:
        """Return the first board's machine, as the board describes it."""
        return self._reference.machine

    @property
    def engines(self) -> Mapping[str, Installed]:
        """Return the engines that the first board has, by name."""
        return self._reference.engines

    @property
    def route(self) -> ExecutionRoute:
        """Return how the boards run models under the profiler."""
        location = f"{', '.join(board.name for board in self._boards)}, over SSH"

        @contextmanager
        def running() -> Iterator[Running]:
            yield Running(self.open_profiled, None)

        return ExecutionRoute(NATIVE, location, native_speed=True, start=running)

    def checks(self) -> tuple[ArtifactCheck, ...]:
        """Return the checks that each built candidate has passed on a board."""
        return tuple(ArtifactCheck(name, "native", self.route.how, "", True) for name in ("load", "self-test"))

    def record(self) -> dict[str, Any]:
        """Return the boards that were used, by name. Each entry has the board's machine and its state at the start."""
        return {
            name: {"machine": description.machine, "state": description.state}
            for name, description in self._used.items()
        }

    def answers(self, model: Path, settings: SessionSettings, judge: Callable[[Any], T]) -> T:
        """Open a session on a board and return the result of `judge` for it. See `Clock.answers`."""

        def run(ready: _Ready) -> T:
            session = ready.models.open(model, settings)
            verdict = judge(session)
            # A board has little memory, and the next model needs it.
            session.close()
            return verdict

        return self.run_on_next(run)

    def race(
        self, models: Mapping[str, _Model], feed: Mapping[str, Any], rules: RaceRules, on_round: Callable[[], None]
    ) -> SpeedRanking:
        """Compare the speed of all models on one board. See `Clock.race`."""

        def run(ready: _Ready) -> SpeedRanking:
            requests = [
                {
                    **build_open_request(
                        ready.session.send_model(model, settings.engine), add_model_options(model, settings)
                    ),
                    "name": name,
                }
                for name, (model, settings) in models.items()
            ]
            request = {"do": "race", "models": requests, "feed": ready.session.send_samples([feed])[0], **asdict(rules)}
            guest = ready.models.guest()
            # allow as much time for opening the models as for the comparison itself
            guest.request_s = link.REQUEST_S + 2 * rules.arguments["max_duration_s"]
            ranking = _parse_ranking(ready.session, *guest.exchange(request))
            # The board is not trusted: a ranking of other models would choose a winner that never ran.
            if ranking.distributions.keys() != models.keys():
                raise senseless_answer_error(ready.session)
            on_round()
            return ranking

        return self.run_on_next(lambda ready: self._run_undisturbed(ready, run))

    def open_profiled(self, model: Path, settings: SessionSettings) -> Any:
        """Return a session under the profiler on a board. See `Clock.open_profiled`."""
        return _Profiled(self, model, settings)

    def peak_memory(self, model: Path, settings: SessionSettings, shapes: Mapping[str, list[int]]) -> int:
        """Return the peak memory of a session on a board. See `Clock.peak_memory`."""

        def run(ready: _Ready) -> int:
            model_request = build_open_request(ready.session.send_model(model, settings.engine), settings)
            request = {"do": "peak", **model_request, "shapes": dict(shapes)}
            reply, _ = ready.models.guest().exchange(request)
            return parse(reply, _Peak, ready.session.board.name, BoardError).session_peak_bytes

        return self.run_on_next(run)

    def run_on_next(self, run: Callable[[_Ready], T]) -> T:
        """Call `run` for the next board in turn. If that fails, drop the board and try the next one."""
        while True:
            ready = self._ready[0]
            # The board goes to the end of the line first, so that it rests while the others work.
            self._ready.append(self._ready.pop(0))
            try:
                outcome = run(ready)
            except BoardError as error:
                self._ready.remove(ready)
                if not self._ready:
                    raise
                self._progress.note(f"{error.text}: continuing without this board")
                continue
            # Only a board that has given a result is part of the record.
            self._used[ready.session.board.name] = ready.description
            return outcome

    def _run_undisturbed(self, ready: _Ready, run: Callable[[_Ready], T]) -> T:
        """Call `run` for a board. If the board throttled during the call, let it rest and call `run` once more."""
        name = ready.session.board.name
        for may_rest in (True, False):
            throttles_before = describe_board(ready.session).state.thermal_throttles
            outcome = run(ready)
            throttles_after = describe_board(ready.session).state.thermal_throttles
            # A board that does not count its throttling cannot be checked, so its result is taken.
            if throttles_before is None or throttles_after is None or throttles_after <= throttles_before:
                return outcome
            if may_rest:
                self._progress.note(f"{name} throttled for heat during a race: it rests for {COOL_S:g} s")
                self._sleep(COOL_S)
        raise BoardError(f"{name} throttles for heat again after a rest", "Cool it, then continue with ⟨resume=True⟩")

    def _check_same(self) -> None:
        profiles = load_profiles()
        # Boards of one profile but with different CPUs have different times, which must not be compared.
        kinds = {
            (
                match_profile(r.description.machine, profiles).profile.name,
                r.description.machine.cpu_name,
            ): r.session.board.name
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
        return self._clock.run_on_next(self._profile)

    def _profile(self, ready: _Ready) -> str:
        prefix, optimized = self._settings.profile_prefix, self._settings.save_optimized_to
        assert prefix is not None
        assert optimized is not None
        guest, folder = ready.models.guest(), f"{ready.session.hello.folder}/tmp"
        request = build_open_request(
            ready.session.send_model(self._model), add_model_options(self._model, self._settings)
        )
        session = guest.open_session({**request, "profile": [f"{folder}/{prefix.name}", f"{folder}/{optimized.name}"]})
        for feed in self._feeds:
            session.run(None, feed)
        local_path = prefix.with_name(f"{prefix.name}.json")
        try:
            local_path.write_bytes(reduce_profile(_read_file(guest, session.end_profiling())))
            graph = _read_file(guest, f"{folder}/{optimized.name}")
            # The graph comes from the board, so it is checked before a file on this machine contains it.
            check_graph(graph, model_bytes(self._model))
            optimized.write_bytes(graph)
        except (KeyError, ValueError) as error:
            raise senseless_answer_error(ready.session) from error
        session.close()
        return str(local_path)


def _read_file(guest: BoardGuest, file: str) -> bytes:
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


def _parse_ranking(session: BoardSession, answer: Mapping[str, Any], arrays: Mapping[str, Any]) -> SpeedRanking:
    """Return the ranking of the models whose speed a board compared."""
    race = parse(answer, _Race, session.board.name, BoardError)
    try:
        distributions = {}
        for name, runner in race.runners.items():
            samples, rounds, disturbed = (
                arrays[f"{runner.index} {key}"] for key in ("samples_ms", "rounds", "disturbed")
            )
            figures = runner.samples_per_query, runner.elapsed_s, disturbed, runner.busy, runner.sessions, runner.stolen
            distributions[name] = Distribution(samples, rounds, *figures)
        # The names in the answer must be the models that were sent, in every part of it.
        tied = {name for pair in race.ties for name in pair}
        if sorted(race.order) != sorted(distributions) or not tied <= {*race.order}:
            raise ValueError("an order of other models")
        return SpeedRanking(race.order, race.settled, race.ties, race.rounds, distributions)
    except (*SENSELESS, ValueError) as error:
        raise senseless_answer_error(session) from error
