"""Run benchmarks, evaluations, gates and bundle checks on boards. Each result includes the board's machine and its
state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.bundle.verify import hash_line, variant_lines
from msgspec import Meta

from edgeq.backends.base import SIMULATORS
from edgeq.bundle.verify import opened
from edgeq.emulate.check import EmulatedCheck, Verified, VerifyRequest, check_variant, samples_of, summary, verify_on
from edgeq.emulate.routes import NATIVE, ExecutionRoute, Running
from edgeq.errors import BoardError, BundleError, CheckFailedError, EdgeqError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import AUTO, resolve
from edgeq.measure.bench import LoadedModel, Workload
from edgeq.measure.evaluation import EvalRequest, EvalResult, run_evaluation
from edgeq.measure.latency import Measurement, measurement
from edgeq.measure.task import TaskOptions, make_task
from edgeq.prove.target_checks import verify_request
from edgeq.remote import link
from edgeq.remote.devices import Board, boards_of
from edgeq.remote.link import Line, Text, read_json
from edgeq.remote.machine import board_record, describe_board
from edgeq.remote.session import SENSELESS, BoardModels, BoardSession, open_board, senseless, start_board_guest
from edgeq.reporting.compare import CompareRequest
from edgeq.reporting.gate import Gated, GateLimits, gate
from edgeq.reporting.timing import BenchReport, FleetRecord, FleetRow, summarised
from edgeq.run.session import SessionSettings, open_request, with_carried
from edgeq.util.display import SILENT, Advance, Progress
from edgeq.util.records import Amount, marked, parse, plain

_AMOUNTS = ("_ms", "_s", "_bytes", "count", "queries")
_LARGEST = 1e15


class BoardBench:
    """Run benchmarks on one board. See `edgeq.measure.bench.BenchPlace`."""

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress

    def models(self, models: Mapping[str, tuple[Path, SessionSettings]], work: Workload) -> Measurement:
        """Measure models on the board. See `BenchPlace.models`."""
        requests = [
            open_request(
                self._session.send_model(path, how.engine, progress=self._progress), with_carried(path, how), name
            )
            for name, (path, how) in models.items()
        ]
        return self._bench({"models": requests, "bundle": ""}, work, models)

    def loaded(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Measure loaded models side by side, each in `sessions` sessions. For a bundle, measure the variant that is
        open.
        """
        requests = [{**self._request(one), "name": name, "sessions": sessions} for name, one in models.items()]
        return self._bench({"models": requests, "bundle": ""}, work, models)

    def _request(self, one: LoadedModel) -> dict[str, Any]:
        if one.variant is not None:
            return {"bundle": self._session.send_bundle(one.path), "variant": one.variant}
        place = self._session.send_model(one.path, one.settings.engine, progress=self._progress)
        return open_request(place, one.settings)

    def bundle(self, bundle: Path, variant: str | None, work: Workload) -> Measurement:
        """Send the bundle, unless the board already has it, and measure it. See `BenchPlace.bundle`."""
        place = self._session.send_bundle(bundle, self._progress)
        return self._bench({"bundle": place, "variant": variant}, work)

    def _bench(self, what: Mapping[str, Any], work: Workload, models: Collection[str] | None = None) -> Measurement:
        session, settings, plain = self._session, work.settings, asdict(work.settings)
        del plain["warm_up"]
        request = {"do": "bench", **what, "settings": plain, "shapes": dict(work.shapes or {}), "feeds": []}
        if work.samples is not None:
            request["feeds"] = session.send_samples(work.samples, self._progress)
        before = describe_board(session)
        runs_s = len(settings.scenarios) * max(settings.min_duration_s, 1.0)
        limit_s = link.BENCH_S + link.BENCH_FACTOR * runs_s
        stage = self._progress.stage(f"measuring on {session.board.name}")
        with start_board_guest(session, request_s=limit_s) as guest, stage:
            report = guest.exchange(request)[0]
        report["board"] = board_record(session, before, describe_board(session))
        try:
            check_amounts(report)
            found = measurement(report)
            named = set(models if models is not None else found.models)
            scenarios = found.scenarios.values()
            if not scenarios or {*found.models} != named or any({*one["models"]} != named for one in scenarios):
                raise ValueError("figures of other models")
            if not {*found.scenarios} <= {*settings.scenarios} or len(found.text(verbose=True)) > link.TABLE:
                raise ValueError("scenarios that were not requested, or texts that are too long")
        except (*SENSELESS, ValueError) as error:
            raise senseless(session) from error
        return found


def check_amounts(value: Any, name: str = "") -> None:
    """Refuse a report with an amount that no measurement can give. Amounts are durations, sizes and counts, recognised
    by the end of their keys.

    Raises:
        ValueError: an amount is negative or far too large.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_amounts(item, key)
    elif isinstance(value, list):
        for item in value:
            check_amounts(item, name)
    elif isinstance(value, int | float) and name.endswith(_AMOUNTS) and not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {value}")


def bench_on(board: Board, run: Callable[..., Measurement], *, progress: Progress = SILENT) -> Measurement:
    """Run a benchmark on a board.

    Args:
        run: `edgeq.measure.bench.bench`, with the models to measure already bound.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `run` raises.
    """
    with open_board(board) as session:
        return run(place=BoardBench(session, progress), progress=progress)


@dataclass(frozen=True)
class BoardEvaluated:
    """Hold an evaluation, together with the board's machine and state as plain values."""

    result: EvalResult
    board: Mapping[str, Any]

    def __record__(self) -> dict[str, Any]:
        return {**marked(self.result), "board": self.board}


def evaluate_on(request: EvalRequest, board: Board, *, progress: Progress = SILENT) -> BoardEvaluated:
    """Run a model or bundle on a board, and return its accuracy or its agreement with a reference that runs on this
    machine.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `run_evaluation` raises.
    """
    with open_board(board) as session:
        before = describe_board(session)
        with BoardModels(session, progress) as models:
            result = run_evaluation(request, opener=models, progress=progress)
        return BoardEvaluated(result, board_record(session, before, describe_board(session)))


OnStatus = Callable[[str, str], None]
"""A function that receives a board's name and its current activity. Several threads call it."""
_AT_ONCE = 64


def measure_fleet(boards: Sequence[Board], run: Callable[..., Measurement], on_status: OnStatus) -> FleetRecord:
    """Run a benchmark on all boards in parallel, and compare the boards' results in the first scenario.

    Args:
        run: `edgeq.measure.bench.bench`, with the models to measure already bound.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(boards))) as pool:
        rows, scenarios = zip(*pool.map(lambda board: _row(board, run, on_status), boards), strict=True)
    return summarised(rows, next(filter(None, scenarios), ""))


def _row(board: Board, run: Callable[..., Measurement], on_status: OnStatus) -> tuple[FleetRow, str]:
    progress = _BoardProgress(board.name, on_status)
    try:
        with progress.stage("connecting"), open_board(board) as session:
            found = run(place=BoardBench(session, progress), progress=progress)
    except EdgeqError as error:
        on_status(board.name, f"failed: {error.problem}")
        return FleetRow(board.name, board.kind, reason=error.text), ""
    on_status(board.name, "done")
    name, scenario = next(iter(parse(plain(found), BenchReport, board.name, BoardError).scenarios.items()))
    latency = {model: entry.latency for model, entry in scenario.models.items()}
    cpu = str(found.machine.get("cpu_name", ""))
    return FleetRow(board.name, board.kind, "", cpu, latency, scenario.ratios, (*progress.notes, *found.notes)), name


class _BoardProgress:
    """Report the progress of one board among several. The status of the board is its current stage."""

    def __init__(self, name: str, on_status: OnStatus) -> None:
        self._name = name
        self._on_status = on_status
        self.notes: list[str] = []

    @contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """Show the stage as the board's status. See `Progress.stage`."""
        del total
        self._on_status(self._name, title)
        yield lambda steps: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self.notes.append(text)


class _BoardPlace(BoardModels):
    """Measure models for a comparison on a board. See `edgeq.reporting.compare.ComparePlace`."""

    @property
    def name(self) -> str:
        """Return the board's name in `devices.toml`."""
        return self._session.board.name

    def measure(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Time the models on the board. See `edgeq.reporting.compare.ComparePlace`."""
        return BoardBench(self._session, self._progress).loaded(models, sessions, work)


def gate_on(
    board: Board, request: CompareRequest, limits: GateLimits, *, update: bool = False, progress: Progress = SILENT
) -> Gated:
    """Run `edgeq.reporting.gate.gate` on a board. If there is no baseline to compare with, do not connect to the board.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `gate` raises.
    """
    if not request.a.exists():
        return gate(request, limits, update=update, progress=progress)
    with open_board(board) as session, _BoardPlace(session, progress) as place:
        return gate(request, limits, update=update, place=place, progress=progress)


_CHECK_FAILED = 10


@dataclass(frozen=True)
class OutputFound:
    """Report the check of one output in a self-test.

    Attributes:
        max_abs_error: the largest error; None if there is a `problem`.
        tolerance: the largest allowed error.
    """

    max_abs_error: Amount | None
    tolerance: Amount
    passed: bool
    problem: Text


@dataclass(frozen=True)
class VariantFound:
    """Report the check of one variant in the form that the runner writes. See
    `edgeq_device.bundle.verify.VariantReport`.
    """

    component: Text
    variant: Text
    status: Literal["passed", "loaded", "failed", "not run", "not used"]
    reason: Text
    outputs: Annotated[Mapping[Text, OutputFound], Meta(max_length=1024)]


@dataclass(frozen=True)
class Verification:
    """Hold the runner's report on a bundle."""

    passed: bool
    architecture: Line
    onnxruntime: Line
    variants: tuple[VariantFound, ...]
    manifest_sha256: Line = ""


@dataclass(frozen=True)
class BoardVerified:
    """Report the check of a bundle on a board.

    Attributes:
        board: the board's machine and state, as plain values.
        verification: the report of the bundle's own runner.
        check: the comparison between the outputs on the board and on this machine; None without samples.
    """

    name: str
    board: Mapping[str, Any]
    verification: Verification
    check: EmulatedCheck | None = None

    def check_passed(self, max_drop: float | None) -> None:
        """Check that no variant failed and that at least one could run.

        Raises:
            CheckFailedError: a variant failed.
            BundleError: no variant could run.
        """
        failed = [found for found in self.verification.variants if found.status == "failed"]
        if failed:
            problem = f"variant {failed[0].variant} fails on {self.name}: {failed[0].reason}"
            raise CheckFailedError(problem, "Do not deploy it there; package it again")
        if not self.verification.passed:
            why = "; ".join(f"{found.variant}: {found.reason}" for found in self.verification.variants if found.reason)
            raise BundleError(f"no variant runs on {self.name} ({why})", "Package it for that board")
        if self.check is not None:
            self.check.check(max_drop)

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result to the user."""
        found = self.verification
        yield f"{self.name}: {found.architecture}, onnxruntime {found.onnxruntime}; {self.board['before'].text()}"
        for one in found.variants:
            yield from variant_lines(plain(one))


def verify_on_board(request: VerifyRequest, board: Board, *, progress: Progress = SILENT) -> BoardVerified:
    """Check a bundle on a board. To turn a failed check into an error, call `BoardVerified.check_passed` on the result.

    Raises:
        BundleError: the bundle is damaged.
        BoardError: the board cannot be used.
        UsageError, DataError: something is wrong with the request or with the samples.
    """
    with open_board(board) as session, opened(request.bundle, expect=request.expect) as bundle:
        session.require("numpy", "onnxruntime")
        before = describe_board(session)
        place = session.send_bundle(request.bundle, progress)
        named = ["--variant", request.variant] if request.variant else []
        named += ["--expect", request.expect] if request.expect else []
        with progress.stage(f"verifying on {board.name}"):
            code, out, last = session.run(
                *session.python, "-B", f"{place}/edgeq_run.py", "verify", "--json", *named, limit_s=link.VERIFY_S
            )
        if code not in (0, _CHECK_FAILED) and not out:
            raise BoardError(f"{board.name}: {last or f'the runner ended with exit code {code}'}")
        found = parse(read_json(out, board), Verification, board.name, BoardError)
        if not _sensible(found, bundle, request.variant):
            raise senseless(session)
        found = replace(found, manifest_sha256=bundle.manifest_sha256)
        check = _compared(request, session, before.machine, progress) if request.data is not None else None
        record = board_record(session, before, describe_board(session))
    return BoardVerified(board.name, record, found, check)


def _sensible(found: Verification, bundle: Bundle, variant: str | None) -> bool:
    """Return whether a correct runner could have written this report.

    The bundle's hash must match, each variant must appear once, and the results must not contradict each other.
    """
    known = [(name, one.name) for name, variants in bundle.components.items() for one in variants]
    named = sorted((one.component, one.variant) for one in found.variants)
    outputs = [output for one in found.variants for output in one.outputs.values()]
    statuses = {one.status for one in found.variants}
    return (
        found.manifest_sha256 in ("", bundle.manifest_sha256)  # older runners do not report the hash
        and named == sorted(pair for pair in known if variant in (None, pair[1]))
        and all(output.problem or output.max_abs_error is not None for output in outputs)
        and not (found.passed and ("failed" in statuses or statuses.isdisjoint(("passed", "loaded"))))
    )


def _compared(request: VerifyRequest, session: BoardSession, machine: Machine, progress: Progress) -> EmulatedCheck:
    """Run the board's variant on this machine as well, and compare the outputs of both machines on samples."""
    task = make_task(request.task, request.options or TaskOptions()) if request.task is not None else None
    target = replace(resolve(AUTO, machine), name=session.board.name)
    with BoardModels(session, progress) as models, opened(request.bundle, expect=request.expect) as bundle:
        name, there = models.open_bundle(request.bundle, request.variant, 0)
        variant = next(v for v in bundle.components[MAIN] if v.name == name)

        @contextmanager
        def running() -> Iterator[Running]:
            yield Running(lambda model, settings: there, None)

        route = ExecutionRoute(NATIVE, "over SSH", native_speed=True, start=running)
        samples = samples_of(request, variant, progress)
        return check_variant(
            variant,
            target,
            detect_machine(),
            route=route,
            samples=samples,
            count=request.count,
            task=task,
            progress=progress,
        )


@dataclass(frozen=True)
class VerifiedEverywhere:
    """Report the checks of a bundle on boards and on the kernels of targets."""

    bundle: Path
    boards: tuple[BoardVerified, ...]
    targets: Verified | None
    max_drop: float | None

    def check(self) -> None:
        """Raise an error for the first failed check. See `BoardVerified.check_passed` and `Verified.check`."""
        for board in self.boards:
            board.check_passed(self.max_drop)
        if self.targets is not None:
            self.targets.check()

    def lines(self) -> list[str]:
        """Return lines of text that describe the result to the user."""
        checks = (*(b.check for b in self.boards if b.check), *(self.targets.checks if self.targets else ()))
        lines = (line for board in self.boards for line in board.lines())
        return [hash_line(self.manifest_sha256), *lines, *summary(checks)]

    @property
    def manifest_sha256(self) -> str:
        """Return the SHA-256 of the bundle's manifest."""
        return self.targets.manifest_sha256 if self.targets else self.boards[0].verification.manifest_sha256

    def __record__(self) -> dict[str, Any]:
        checks = self.targets.checks if self.targets else ()
        found = {"bundle": str(self.bundle), "manifest_sha256": self.manifest_sha256, "checks": checks}
        return {**found, **({"boards": self.boards} if self.boards else {})}


def verify_everywhere(
    bundle: Path, variant: str | None, options: Mapping[str, Any], *, progress: Progress = SILENT
) -> VerifiedEverywhere:
    """Run `edgeq verify --on` with its command-line options. Each name in `--on` is a board or a target."""
    request = verify_request(bundle, variant, options)
    boards = {name: boards_of(name) for name in request.on}
    targets = tuple(name for name, found in boards.items() if not found)
    there = tuple(verify_on_board(request, board, progress=progress) for found in boards.values() for board in found)
    emulated = None
    if targets:
        emulated = verify_on(replace(request, on=targets), simulators=SIMULATORS, progress=progress)
    return VerifiedEverywhere(bundle, there, emulated, request.max_drop)
