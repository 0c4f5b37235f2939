"""Implement `edgeq device report`: check and time bundles on a board, and write the figures to a file that its owner
can publish.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.bundle.package import FLOAT
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.system.places import scratch_folder

from edgeq import __version__, demo
from edgeq.bundle.verify import open_checked
from edgeq.data.open_source import Data
from edgeq.emulate.check import VerifyRequest
from edgeq.errors import UsageError
from edgeq.hardware.measured import (
    SCHEMA,
    BoardReport,
    CheckedVariant,
    Conditions,
    MeasuredBundle,
    Percentiles,
    as_label,
)
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import load_targets, resolve
from edgeq.jobs.package import package
from edgeq.measure.bench import bench
from edgeq.measure.latency import Measurement, read_speed
from edgeq.measure.loaded_model import is_bundle
from edgeq.remote.bench import run_bench
from edgeq.remote.devices import Board
from edgeq.remote.machine import BoardState, Description, detect_board
from edgeq.remote.verify import BoardVerified, VariantOutcome, verify_on_board
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_free, output_file
from edgeq.util.records import plain


@dataclass(frozen=True)
class ReportedBoard:
    """Report the result of `report_board`.

    Attributes:
        output: the written file.
        verified: the check of each bundle, with the board's own reasons, which the file leaves out.
    """

    output: Path
    report: BoardReport
    verified: tuple[BoardVerified, ...]

    def __record__(self) -> dict[str, Any]:
        return {"output": str(self.output), **plain(self.report)}

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result to the user."""
        yield from self.report.lines()
        yield f"{self.output} names no user, host, address, path or serial number"

    def check(self) -> None:
        """Raise an error for the first failed self-test. See `BoardVerified.check_passed`."""
        for verified in self.verified:
            verified.check_passed(None)


def report_board(
    board: Board,
    bundle: Path | None = None,
    *,
    output: Path,
    target: str | None = None,
    settings: BenchSettings | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> ReportedBoard:
    """Check and time edgeq's demo model on a board, and also `bundle`, and write the report. The report is written even
    if a self-test fails; to turn a failure into an error, call `ReportedBoard.check` on the result.

    Args:
        target: target or profile to build the demo model for, and to name in the report. None builds it for the
            profile that fits the board, and names the target that is called like the board.

    Raises:
        BundleError: `bundle` is damaged.
        UsageError: `bundle` is not a bundle, or `target` is another architecture than the board.
        OutputError: the output exists, or cannot be written.
        BoardError: the board cannot be used.
        EdgeqError: the demo model cannot be built for the target.
    """
    check_free(output, force=force, kind="file")
    if bundle is not None:
        if not is_bundle(bundle):
            raise UsageError(f"{bundle} is not a bundle", "Make one with `edgeq package`")
        # A damaged bundle is refused before the board spends minutes on the demo model.
        with open_checked(bundle):
            pass
    initial = detect_board(board)
    profile = match_profile(initial.machine, load_profiles()).profile.name
    named = _find_target(initial.machine.board) or profile
    if target is not None:
        given, architecture = resolve(target), initial.machine.architecture
        if given.architecture not in ("any", architecture):
            problem = f"{board.name} is {architecture}, but {given.name} is {given.architecture}"
            raise UsageError(problem, "Name the target that the board is, or leave ⟨target⟩ out")
        named = given.name
    verified, bundles, state = [], [], initial.state
    with scratch_folder("edgeq-report-") as folder:
        demo_bundle = Path(folder) / "demo"
        with progress.stage("building the demo model"):
            sources, build_for = (demo.MODEL, Data(demo.CALIBRATION)), (target or profile,)
            # The board itself checks the bundle next, so no emulated one does.
            package(*sources, demo_bundle, targets=build_for, with_float=True, timed=False, emulate=False)
        for name, path in (("demo", demo_bundle), *(((bundle.stem, bundle),) if bundle is not None else ())):
            check = verify_on_board(VerifyRequest(path, ()), board, progress=progress)
            timing = None
            if check.verification.passed:
                timing = run_bench(board, functools.partial(bench, path, settings=settings), progress=progress)
                state = timing.report["board"]["after"]
            verified.append(check)
            bundles.append(_describe_bundle(name, check, timing))
    report = _describe_board(initial, state, target=named, profile=profile, bundles=tuple(bundles))
    with output_file(output, force=force) as draft:
        draft.write_text(json.dumps(plain(report), indent=2) + "\n", "utf-8")
    return ReportedBoard(output, report, tuple(verified))


def _find_target(board: str) -> str:
    """Return the target whose name is part of the board's name, such as "raspberry-pi-5" for "Raspberry Pi 5 Model B".
    Return "" if there is none.
    """
    words = f"-{'-'.join(re.findall(r'[a-z0-9]+', board.lower()))}-"
    # the longest name is the most exact one
    return max((name for name in load_targets() if f"-{name}-" in words), key=len, default="")


def _describe_bundle(name: str, check: BoardVerified, timing: Measurement | None) -> MeasuredBundle:
    latency, variant, speedup = {}, "", None
    if timing is not None:
        figures = {model: timing.latency(model) for model in timing.models}
        latency = {as_label(m): Percentiles(f["p50_ms"], f["p90_ms"], f["p99_ms"]) for m, f in figures.items()}
        variant = next((model for model in figures if model != FLOAT), "")
        if variant and FLOAT in figures:
            claim = read_speed(timing, variant)
            speedup = replace(claim, reason=as_label(claim.reason))
    return MeasuredBundle(
        as_label(name),
        check.verification.manifest_sha256,
        check.verification.passed,
        tuple(map(_describe_variant, check.verification.variants)),
        latency,
        as_label(variant),
        speedup,
    )


def _describe_variant(outcome: VariantOutcome) -> CheckedVariant:
    # The reasons may contain paths, so they are only printed.
    errors = [output for output in outcome.outputs.values() if output.max_abs_error is not None]
    worst = max(errors, key=lambda output: output.max_abs_error or 0.0, default=None)
    error, tolerance = (worst.max_abs_error, worst.tolerance) if worst is not None else (None, None)
    return CheckedVariant(as_label(outcome.variant), outcome.status, error, tolerance)


def _describe_board(initial: Description, final: BoardState, **fields: Any) -> BoardReport:
    machine = initial.machine
    versions = {"edgeq": __version__, **machine.runtimes, **initial.modules}
    engines = {name: engine.version for name, engine in initial.engines.items() if engine.version}
    return BoardReport(
        schema=SCHEMA,
        board=as_label(machine.board),
        compatible=tuple(map(as_label, initial.compatible)),
        cpu=as_label(machine.cpu_name),
        architecture=as_label(machine.architecture),
        cores=machine.cores or machine.threads,
        system=as_label(machine.os),
        governors=tuple(map(as_label, initial.state.governors)),
        versions=_label_all(versions),
        engines=_label_all(engines),
        drivers=_label_all({gpu.name: gpu.driver for gpu in machine.gpus}),
        before=_describe_state(initial.state),
        after=_describe_state(final),
        **fields,
    )


def _label_all(texts: Mapping[str, str]) -> dict[str, str]:
    return {as_label(name): as_label(text) for name, text in texts.items()}


def _describe_state(state: BoardState) -> Conditions:
    hottest = max(state.temperature_c.values(), default=None)
    return Conditions(state.clock_mhz, hottest, state.thermal_throttles, state.load)
