"""A freshly built variant on its target's own kernels, before it goes into a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.backends.base import SIMULATORS
from edgeq.emulate.check import EmulatedCheck, Trial, VerifyRequest, check_trial, route_for
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, ExecutionRoute
from edgeq.errors import UsageError
from edgeq.hardware.detect import Machine
from edgeq.jobs.builds import too_slow
from edgeq.jobs.job import Built, Job, share
from edgeq.jobs.variants import selftest_cases
from edgeq.measure.checks import Check, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.measure.task import Task, split_task_options
from edgeq.model.macs import node_macs
from edgeq.util.display import SILENT, Progress

_KINDS: Mapping[str, CheckKind] = {NATIVE: "native", EMULATED: "emulated", MODELLED: "modelled", NOT_RUN: "none"}
# An emulated CPU does about a hundredth of what a real one does: so many multiply-accumulates take a minute or two.
_MACS = 4_000_000_000
_MOST, _MOST_AT_NATIVE_SPEED = 16, 100


def check_built(
    job: Job,
    built: Built,
    coverage: Coverage,
    machine: Machine,
    *,
    task: Task | None = None,
    selftest: int = 2,
    progress: Progress = SILENT,
) -> EmulatedCheck:
    """Load `built` on its target's kernels, take the self-test's answers there, and compare both machines with float32.

    No bound is put on how far the two machines' answers lie apart: a network that follows float32 loosely spreads
    roundings as wide. What counts is that the target's follow float32 as well as this machine's.

    Args:
        coverage: of `built`.
        selftest: how many samples make the self-test.

    Raises:
        CheckFailedError: it fails there.
    """
    route = route_for(built.target, machine, built.artifact.settings().engine, simulators=SIMULATORS, progress=progress)
    count = _count(job, coverage, route)
    reason = too_slow(route, coverage, selftest + count, built.target, progress)
    if reason:
        return EmulatedCheck(built.target.name, "", NOT_RUN, route.how, NOT_RUN, reason)
    cases = selftest_cases(built.artifact, job.validation, selftest)
    trial = Trial(
        model=built.artifact.model,
        settings=built.artifact.settings(),
        vectors=[(case.inputs, case.outputs) for case in cases],
        float_model=job.prepared.path,
        samples=job.validation,
        count=count,
        task=task,
    )
    found = check_trial(trial, built.target, machine, route=route, progress=progress)
    found.check()
    return found


def checks_of(found: EmulatedCheck) -> tuple[Check, ...]:
    """The result of a check on the target's kernels, for the list of checks."""
    kind = _KINDS[found.where]
    if kind == "none":
        return (Check("kernels", kind, found.how, found.reason),)
    checks = [Check("load", kind, found.how, "", True), Check("self-test", kind, found.how, "", True)]
    if found.agreement is not None:
        detail = f"SQNR {found.agreement.sqnr_db:.1f} dB on {found.samples} samples"
        checks.append(Check("accuracy", kind, found.how, detail, True))
    return tuple(checks)


def _count(job: Job, coverage: Coverage, route: ExecutionRoute) -> int:
    """How many samples are compared: as many as an emulated CPU manages in a minute or two."""
    if route.native_speed:
        return _MOST_AT_NATIVE_SPEED
    macs = coverage.int8_macs + coverage.float_macs or sum(node_macs(job.prepared.model).values())
    return max(1, min(_MOST, _MACS // max(macs, 1)))


def verify_request(bundle: Path, variant: str | None, options: Mapping[str, Any]) -> VerifyRequest:
    """The request of `edgeq verify --on`, from its flat options."""
    named, _ = split_task_options(options)
    same = {name: options[name] for name in ("on", "data", "count", "preprocess", "labels", "task", "expect")}
    drop = share("--max-drop", options["max_drop"])
    if drop is not None and options["task"] is None:
        raise UsageError("--max-drop needs something that measures accuracy", "Give --task and labelled --data")
    return VerifyRequest(bundle, variant=variant, options=named, max_drop=drop, **same)


def refuse_without_target(options: Mapping[str, Any]) -> None:
    """Refuse options for comparing a target with this machine where no target is named.

    Raises:
        UsageError: one is given.
    """
    given = next((name for name, value in options.items() if value not in (None, ())), None)
    if given is not None:
        option = f"--{given.replace('_', '-')}"
        raise UsageError(f"{option} is for checks on another target's kernels", "Name the target with --on")
