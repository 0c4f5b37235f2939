"""Run a model on its target's kernels, emulated if need be, and compare its outputs with those of this machine."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.backends.base import SIMULATORS
from edgeq.emulate.check import CheckedModel, EmulatedCheck, check_trial, find_route
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, ExecutionRoute
from edgeq.measure.checks import ArtifactCheck, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.model.macs import node_macs
from edgeq.prove.builds import too_slow
from edgeq.prove.job import Built, Job
from edgeq.prove.variants import selftest_cases

_KINDS: Mapping[str, CheckKind] = {NATIVE: "native", EMULATED: "emulated", MODELLED: "modelled", NOT_RUN: "none"}
# Number of multiply-accumulates that an emulated CPU computes in a minute or two. An emulated CPU is about a hundred
# times slower than a real one.
_MACS = 4_000_000_000
# More samples would rarely show a difference between kernels that these do not show.
_MOST, _MOST_AT_NATIVE_SPEED = 16, 100


def check_built(
    job: Job,
    built: Built,
    coverage: Coverage,
    *,
    selftest: int = 2,
) -> EmulatedCheck:
    """Load `built` on its target's kernels, run the self-test there, and compare the outputs of both machines with
    those of float32.

    There is no limit on the difference between the two machines' outputs, because a network whose outputs are far from
    float32 also amplifies roundings. Instead, the target's outputs must be as close to float32 as this machine's
    outputs are.

    Args:
        coverage: the coverage of `built`.
        selftest: the number of samples in the self-test.

    Raises:
        CheckFailedError: the model fails on the target's kernels.
    """
    machine, progress = job.machine, job.progress
    route = find_route(
        built.target, machine, built.artifact.settings().engine, simulators=SIMULATORS, progress=progress
    )
    count = _count(job, coverage, route)
    # Before the model is loaded, because an emulated CPU would already take minutes for that.
    reason = too_slow(route, coverage, selftest + count, built.target, progress)
    if reason:
        return EmulatedCheck(built.target.name, "", NOT_RUN, route.how, NOT_RUN, reason)
    cases = selftest_cases(built.artifact, job.validation, selftest)
    trial = CheckedModel(
        model=built.artifact.model,
        settings=built.artifact.settings(),
        vectors=[(case.inputs, case.outputs) for case in cases],
        float_model=job.prepared.path,
        samples=job.validation,
        count=count,
        task=job.task,
        basis=job.basis,
    )
    check = check_trial(trial, built.target, machine, route=route, progress=progress)
    check.check()
    return check


def checks_of(check: EmulatedCheck) -> tuple[ArtifactCheck, ...]:
    """Return the result of a check on the target's kernels as entries for the list of checks."""
    kind = _KINDS[check.where]
    if kind == "none":
        return (ArtifactCheck("kernels", kind, check.how, check.reason),)
    checks = [ArtifactCheck("load", kind, check.how, "", True), ArtifactCheck("self-test", kind, check.how, "", True)]
    if check.agreement is not None:
        detail = f"SQNR {check.agreement.sqnr_db:.1f} dB on {check.samples} samples"
        checks.append(ArtifactCheck("accuracy", kind, check.how, detail, True))
    return tuple(checks)


def _count(job: Job, coverage: Coverage, route: ExecutionRoute) -> int:
    """Return how many samples to compare: as many as an emulated CPU runs in a minute or two."""
    if route.native_speed:
        return _MOST_AT_NATIVE_SPEED
    macs = coverage.int8_macs + coverage.float_macs or sum(node_macs(job.prepared.model).values())
    return max(1, min(_MOST, _MACS // max(macs, 1)))
