"""Run a model on its target's kernels, emulated if need be, and compare its outputs with those of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgeq.backends.base import SIMULATORS, Artifact
from edgeq.emulate.check import CheckedModel, EmulatedCheck, check_trial, find_route
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, ExecutionRoute
from edgeq.errors import CheckFailedError
from edgeq.measure.checks import ArtifactCheck, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.model.macs import node_macs
from edgeq.prove.builds import too_slow
from edgeq.prove.job import Built, Job
from edgeq.prove.variants import ProvenVariant, selftest_cases
from edgeq.run.engines import EngineChoice
from edgeq.run.session import SessionSettings

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
        host=_host(built.artifact),
    )
    check = check_trial(trial, built.target, machine, route=route, progress=progress)
    check.check()
    return check


def prove_precision(job: Job, variant: ProvenVariant, choice: EngineChoice, selftest: int) -> ProvenVariant:
    """Return `variant` with its engine in another precision, proven on the target's kernels. The simulation on this
    machine says nothing about that precision.

    Args:
        choice: the variant's engine, in the other precision.
        selftest: the number of samples in the self-test.

    Raises:
        CheckFailedError: the target's kernels cannot run here, or the model fails on them.
    """
    artifact = replace(variant.built.artifact, engine=choice)
    built = replace(variant.built, artifact=artifact)
    check = check_built(job, built, variant.proof.coverage, selftest=selftest)
    if check.agreement is None:
        raise CheckFailedError(
            f"{choice.name} for {built.target.name} can be proven only on the target's kernels: {check.reason}",
            "Leave ⟨engine⟩ out",
        )
    proof = replace(
        variant.proof,
        agreement=check.agreement,
        accuracy={},
        speed=None,
        samples=check.samples,
        engine=choice.name,
        drop_interval=None,
        operating=None,
        repair=None,
    )
    kept = [entry for entry in variant.checks if entry.name in ("coverage", "runtime")]
    return replace(variant, built=built, proof=proof, checks=(*kept, *checks_of(check)), emulated=check)


def _host(artifact: Artifact) -> tuple[Path, SessionSettings] | None:
    """Return the model to run on this machine, and its settings, if the artifact has a simulation and an engine of its
    own. That engine's kernels on this machine need not be those of the target.
    """
    if artifact.simulation is None or artifact.plugin is None:
        return None
    return artifact.proof_model, artifact.proof_settings()


def checks_of(check: EmulatedCheck) -> tuple[ArtifactCheck, ...]:
    """Return the result of a check on the target's kernels as entries for the list of checks."""
    kind = _KINDS[check.where]
    if kind == "none":
        return (ArtifactCheck("kernels", kind, check.how, check.reason),)
    checks = [ArtifactCheck("load", kind, check.how, "", True), ArtifactCheck("self-test", kind, check.how, "", True)]
    if check.agreement is not None:
        detail = f"SQNR {check.agreement.sqnr_db:.1f} dB on {check.samples} samples"
        if check.host_agreement is not None:
            # Equal values prove a model of the kernels, with which this machine computes.
            detail += f"; every value is that of this machine in {check.equal}"
            detail += f", and no value differs by more than {check.difference:.3g}" if check.difference else ""
        checks.append(ArtifactCheck("accuracy", kind, check.how, detail, True))
    return tuple(checks)


def _count(job: Job, coverage: Coverage, route: ExecutionRoute) -> int:
    """Return how many samples to compare: as many as an emulated CPU runs in a minute or two."""
    if route.native_speed:
        return _MOST_AT_NATIVE_SPEED
    macs = coverage.int8_macs + coverage.float_macs or sum(node_macs(job.prepared.model).values())
    return max(1, min(_MOST, _MACS // max(macs, 1)))
