"""`edgeq verify --on BOARD`: the bundle's own runner checks it on the board; samples are compared with this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from edgeq_device.package import MAIN, Bundle
from edgeq_device.text import hash_line, variant_lines
from msgspec import Meta

from edgeq.backends.base import SIMULATORS
from edgeq.bundle.verify import opened
from edgeq.emulate.check import EmulatedCheck, Verified, VerifyRequest, check_variant, samples_of, summary, verify_on
from edgeq.emulate.routes import NATIVE, ExecutionRoute, Running
from edgeq.errors import BoardError, BundleError, CheckFailedError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import AUTO, resolve
from edgeq.jobs.target_checks import verify_request
from edgeq.measure.task import TaskOptions, make_task
from edgeq.remote import link
from edgeq.remote.devices import Board, boards_of
from edgeq.remote.link import Line, Text, read_json
from edgeq.remote.machine import board_record, describe_board
from edgeq.remote.session import BoardModels, BoardSession, open_board, senseless
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Amount, parse, plain

_CHECK_FAILED = 10


@dataclass(frozen=True)
class OutputFound:
    """One output of a self-test: the largest error (None: see `problem`) and what is allowed."""

    max_error: Amount | None
    tolerance: Amount
    passed: bool
    problem: Text


@dataclass(frozen=True)
class VariantFound:
    """One variant, as the runner reports it: see `edgeq_device.verify.VariantReport`."""

    component: Text
    variant: Text
    status: Literal["passed", "loaded", "failed", "not run", "not used"]
    reason: Text
    outputs: Annotated[Mapping[Text, OutputFound], Meta(max_length=1024)]


@dataclass(frozen=True)
class Verification:
    """What the runner reports of a bundle."""

    passed: bool
    architecture: Line
    onnxruntime: Line
    variants: tuple[VariantFound, ...]
    manifest_sha256: Line = ""


@dataclass(frozen=True)
class BoardVerified:
    """A bundle on a board.

    Attributes:
        board: what it is and was doing, plain values.
        verification: by the bundle's own runner.
        check: its outputs beside this machine's; None without samples.
    """

    name: str
    board: Mapping[str, Any]
    verification: Verification
    check: EmulatedCheck | None = None

    def check_passed(self, max_drop: float | None) -> None:
        """Raise CheckFailedError where a variant failed, BundleError where none could run."""
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
        """For people."""
        found = self.verification
        yield f"{self.name}: {found.architecture}, onnxruntime {found.onnxruntime}; {self.board['before'].text()}"
        for one in found.variants:
            yield from variant_lines(plain(one))


def verify_on_board(request: VerifyRequest, board: Board, *, progress: Progress = SILENT) -> BoardVerified:
    """Check a bundle on a board; `BoardVerified.check_passed` turns a bad one into an error.

    Raises:
        BundleError: the bundle is damaged.
        BoardError: the board cannot be used.
        UsageError, DataError: something is wrong with the request, or the samples.
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
    """Tell whether a runner can report this: the bundle's hash and variants, each once, and results that agree."""
    known = [(name, one.name) for name, variants in bundle.components.items() for one in variants]
    named = sorted((one.component, one.variant) for one in found.variants)
    outputs = [output for one in found.variants for output in one.outputs.values()]
    statuses = {one.status for one in found.variants}
    return (
        found.manifest_sha256 in ("", bundle.manifest_sha256)  # early runners report none
        and named == sorted(pair for pair in known if variant in (None, pair[1]))
        and all(output.problem or output.max_error is not None for output in outputs)
        and not (found.passed and ("failed" in statuses or statuses.isdisjoint(("passed", "loaded"))))
    )


def _compared(request: VerifyRequest, session: BoardSession, machine: Machine, progress: Progress) -> EmulatedCheck:
    """The variant that runs on the board beside the same one here, on samples."""
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
    """A bundle on boards, and on the kernels of targets."""

    bundle: Path
    boards: tuple[BoardVerified, ...]
    targets: Verified | None
    max_drop: float | None

    def check(self) -> None:
        """Raise for the first that failed; see `BoardVerified.check_passed` and `Verified.check`."""
        for board in self.boards:
            board.check_passed(self.max_drop)
        if self.targets is not None:
            self.targets.check()

    def lines(self) -> list[str]:
        """For people."""
        checks = (*(b.check for b in self.boards if b.check), *(self.targets.checks if self.targets else ()))
        lines = (line for board in self.boards for line in board.lines())
        return [hash_line(self.manifest_sha256), *lines, *summary(checks)]

    @property
    def manifest_sha256(self) -> str:
        """Of the bundle."""
        return self.targets.manifest_sha256 if self.targets else self.boards[0].verification.manifest_sha256

    def __record__(self) -> dict[str, Any]:
        checks = self.targets.checks if self.targets else ()
        found = {"bundle": str(self.bundle), "manifest_sha256": self.manifest_sha256, "checks": checks}
        return {**found, **({"boards": self.boards} if self.boards else {})}


def verify_everywhere(
    bundle: Path, variant: str | None, options: Mapping[str, Any], *, progress: Progress = SILENT
) -> VerifiedEverywhere:
    """What `edgeq verify --on` does, from its flat options: each name is a board's or a target's."""
    request = verify_request(bundle, variant, options)
    boards = {name: boards_of(name) for name in request.on}
    targets = tuple(name for name, found in boards.items() if not found)
    there = tuple(verify_on_board(request, board, progress=progress) for found in boards.values() for board in found)
    emulated = None
    if targets:
        emulated = verify_on(replace(request, on=targets), simulators=SIMULATORS, progress=progress)
    return VerifiedEverywhere(bundle, there, emulated, request.max_drop)
