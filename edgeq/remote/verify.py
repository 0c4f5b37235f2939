"""Check bundles on boards: the runner's own report, and a comparison of outputs with this machine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.bundle.verify import hash_line, variant_lines
from msgspec import Meta

from edgeq.backends.base import SIMULATORS
from edgeq.bundle.verify import open_checked
from edgeq.emulate.check import (
    EmulatedCheck,
    Verified,
    VerifyRequest,
    check_variant,
    open_variant_samples,
    summarise,
    verify_on,
)
from edgeq.emulate.routes import NATIVE, ExecutionRoute, Running
from edgeq.errors import BoardError, BundleError, CheckFailedError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import AUTO, resolve
from edgeq.measure.task import TaskOptions, make_task
from edgeq.prove.verify_options import read_verify_request
from edgeq.remote import link
from edgeq.remote.devices import Board, find_boards
from edgeq.remote.link import Line, Text, read_json
from edgeq.remote.machine import describe_board, record_board
from edgeq.remote.session import BoardModels, BoardSession, open_board, senseless_answer_error
from edgeq.util.display import SILENT, Progress
from edgeq.util.records import Amount, parse, plain

# The runner's exit code for a failed check. Its report is then as complete as after success.
_CHECK_FAILED = 10


@dataclass(frozen=True)
class OutputOutcome:
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
class VariantOutcome:
    """Report the check of one variant in the form that the runner writes. See
    `edgeq_device.bundle.verify.VariantReport`.
    """

    component: Text
    variant: Text
    status: Literal["passed", "loaded", "failed", "not run", "not used"]
    reason: Text
    outputs: Annotated[Mapping[Text, OutputOutcome], Meta(max_length=1024)]


@dataclass(frozen=True)
class Verification:
    """Hold the runner's report on a bundle."""

    passed: bool
    architecture: Line
    onnxruntime: Line
    variants: tuple[VariantOutcome, ...]
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
        failed = [variant for variant in self.verification.variants if variant.status == "failed"]
        if failed:
            problem = f"variant {failed[0].variant} fails on {self.name}: {failed[0].reason}"
            raise CheckFailedError(problem, "Do not deploy it there; package it again")
        # Nothing failed, but nothing ran either: that is a bundle for other machines, not a wrong model.
        if not self.verification.passed:
            why = "; ".join(
                f"{variant.variant}: {variant.reason}" for variant in self.verification.variants if variant.reason
            )
            raise BundleError(f"no variant runs on {self.name} ({why})", "Package it for that board")
        if self.check is not None:
            self.check.check(max_drop)

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result to the user."""
        verification = self.verification
        state = self.board["before"].text()
        yield f"{self.name}: {verification.architecture}, onnxruntime {verification.onnxruntime}; {state}"
        for variant in verification.variants:
            yield from variant_lines(plain(variant))


def verify_on_board(request: VerifyRequest, board: Board, *, progress: Progress = SILENT) -> BoardVerified:
    """Check a bundle on a board. To turn a failed check into an error, call `BoardVerified.check_passed` on the result.

    Raises:
        BundleError: the bundle is damaged.
        BoardError: the board cannot be used.
        UsageError, DataError: something is wrong with the request or with the samples.
    """
    with open_board(board) as session, open_checked(request.bundle, expect=request.expect) as bundle:
        session.require("numpy", "onnxruntime")
        initial = describe_board(session)
        place = session.send_bundle(request.bundle, progress)
        named = ["--variant", request.variant] if request.variant else []
        named += ["--expect", request.expect] if request.expect else []
        with progress.stage(f"verifying on {board.name}"):
            code, out, error_line = session.run(
                *session.python, "-B", f"{place}/edgeq_run.py", "verify", "--json", *named, limit_s=link.VERIFY_S
            )
        # A report on stdout says more than the exit code, so the code counts only without one.
        if code not in (0, _CHECK_FAILED) and not out:
            raise BoardError(f"{board.name}: {error_line or f'the runner ended with exit code {code}'}")
        verification = parse(read_json(out, board), Verification, board.name, BoardError)
        if not _is_sensible(verification, bundle, request.variant):
            raise senseless_answer_error(session)
        # Older runners leave the hash out. The bundle that was sent is known here.
        verification = replace(verification, manifest_sha256=bundle.manifest_sha256)
        check = _compare_outputs(request, session, initial.machine, progress) if request.data is not None else None
        record = record_board(session, initial, describe_board(session))
    return BoardVerified(board.name, record, verification, check)


def _is_sensible(report: Verification, bundle: Bundle, variant: str | None) -> bool:
    """Return whether a correct runner could have written this report.

    The bundle's hash must match, each variant must appear once, and the results must not contradict each other.
    """
    # The report is from an untrusted board, and a report on other variants would pass for a success.
    expected = [(name, entry.name) for name, variants in bundle.components.items() for entry in variants]
    named = sorted((entry.component, entry.variant) for entry in report.variants)
    outputs = [output for entry in report.variants for output in entry.outputs.values()]
    statuses = {entry.status for entry in report.variants}
    return (
        report.manifest_sha256 in ("", bundle.manifest_sha256)  # older runners do not report the hash
        and named == sorted(pair for pair in expected if variant in (None, pair[1]))
        and all(output.problem or output.max_abs_error is not None for output in outputs)
        and not (report.passed and ("failed" in statuses or statuses.isdisjoint(("passed", "loaded"))))
    )


def _compare_outputs(
    request: VerifyRequest, session: BoardSession, machine: Machine, progress: Progress
) -> EmulatedCheck:
    """Run the board's variant on this machine as well, and compare the outputs of both machines on samples."""
    task = make_task(request.task, request.options or TaskOptions()) if request.task is not None else None
    # The check needs a target, and the board itself is the best one: it has the profile that fits its machine.
    target = replace(resolve(AUTO, machine), name=session.board.name)
    with BoardModels(session, progress) as models, open_checked(request.bundle, expect=request.expect) as bundle:
        # The board's own runner chooses the variant, as it will after deployment.
        name, board_session = models.open_bundle(request.bundle, request.variant, 0)
        variant = next(v for v in bundle.components[MAIN] if v.name == name)

        @contextmanager
        def running() -> Iterator[Running]:
            yield Running(lambda model, settings: board_session, None)

        route = ExecutionRoute(NATIVE, "over SSH", native_speed=True, start=running)
        samples = open_variant_samples(request, variant, progress)
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
        return [hash_line(self.manifest_sha256), *lines, *summarise(checks)]

    @property
    def manifest_sha256(self) -> str:
        """Return the SHA-256 of the bundle's manifest."""
        return self.targets.manifest_sha256 if self.targets else self.boards[0].verification.manifest_sha256

    def __record__(self) -> dict[str, Any]:
        checks = self.targets.checks if self.targets else ()
        record = {"bundle": str(self.bundle), "manifest_sha256": self.manifest_sha256, "checks": checks}
        return {**record, **({"boards": self.boards} if self.boards else {})}


def verify_everywhere(
    bundle: Path, variant: str | None, options: Mapping[str, Any], *, progress: Progress = SILENT
) -> VerifiedEverywhere:
    """Run `edgeq verify` with its arguments. Each name in `on` is a board or a target."""
    request = read_verify_request(bundle, variant, options)
    boards = {name: find_boards(name) for name in request.on}
    # A name that is no board can only be a target, and `verify_on` reports it if it is neither.
    targets = tuple(name for name, matches in boards.items() if not matches)
    board_checks = tuple(
        verify_on_board(request, board, progress=progress) for matches in boards.values() for board in matches
    )
    emulated = None
    if targets:
        emulated = verify_on(replace(request, on=targets), simulators=SIMULATORS, progress=progress)
    return VerifiedEverywhere(bundle, board_checks, emulated, request.max_drop)
