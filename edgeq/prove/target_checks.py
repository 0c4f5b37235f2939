"""Choose the checks of a variant that apply to its target, and record how each check was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq_device.engines.catalog import find_library, parse_version, plugin_of

from edgeq.backends.base import SIMULATORS, Artifact, backend_named
from edgeq.emulate.audit import audit, graph_settings
from edgeq.emulate.check import CheckedModel, EmulatedCheck, VerifyRequest, check_trial, route_for
from edgeq.emulate.routes import EMULATED, MODELLED, NATIVE, NOT_RUN, ExecutionRoute
from edgeq.errors import CheckFailedError, UsageError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.coverage import ArtifactCheck, CheckKind, Coverage
from edgeq.measure.task import split_task_options
from edgeq.model.products import node_macs
from edgeq.prove.builds import Builds, kernels_saturate, too_slow
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import Proof
from edgeq.prove.saturation import Decision, kernel_table
from edgeq.prove.variants import ProvenVariant, selftest_cases
from edgeq.run.engines import Engine, EngineChoice
from edgeq.run.session import onnxruntime
from edgeq.util.numbers import parse_drop
from edgeq.util.registry import device_errors

_MADE = ("load", "accuracy", "self-test")
_FOREIGN = "run on this machine's kernels, not on the target's"
_MODEL = "a model of the target's arithmetic, run on this machine"
_EXACT = "this machine's exact kernels, which give the target's sums: nothing can saturate there"


def artifact_checks(
    built: Built, proof: Proof, machine: Machine, decision: Decision | None
) -> tuple[ArtifactCheck, ...]:
    """Return the checks that do not need the target. These are the checks made on this machine and the check with the
    model of saturating kernels.
    """
    artifact, target = built.artifact, built.target
    saturation = saturation_check(built, decision)
    how: dict[str, tuple[CheckKind, str]] = dict.fromkeys(_MADE, ("none", _FOREIGN))
    if runs_natively(target, machine):
        how = dict.fromkeys(_MADE, ("native", "this machine"))
    elif artifact.coverage is not None:
        there = artifact.coverage.how if artifact.plugin is not None else _MODEL
        how = dict.fromkeys(_MADE, ("modelled", there))
        how["load"] = (
            how["load"] if artifact.plugin is not None else ("none", "the target's runtime is not on this machine")
        )
        saturation = None
    elif saturation is not None and saturation.passed and target.architecture == machine.architecture:
        how |= dict.fromkeys(_MADE[1:], ("modelled", _EXACT))
    return _checks(proof, how, saturation)


def _checks(
    proof: Proof, how: Mapping[str, tuple[CheckKind, str]], saturation: ArtifactCheck | None
) -> tuple[ArtifactCheck, ...]:
    """Return the checks that a proof contains, each with its kind and the place where it was made."""
    details = {"accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples"}
    load, *others = (
        ArtifactCheck(name, kind, where, details.get(name, ""), None if kind == "none" else True)
        for name, (kind, where) in how.items()
    )
    return (load, coverage_check(proof.coverage), *others, *([saturation] if saturation else []))


def coverage_check(found: Coverage) -> ArtifactCheck:
    """Return the coverage as a check."""
    if found.basis in ("native", "emulated", "modelled"):
        return ArtifactCheck("coverage", found.basis, found.how, found.summary(), True)
    return ArtifactCheck("coverage", "none", found.how, found.summary())


def saturation_check(built: Built, decision: Decision | None) -> ArtifactCheck | None:
    """Use the weights to check whether sums of two products saturate in 16 bits. Return None if the artifact's kernels
    do not add in 16 bits, or if nothing is known about the kernels of its plug-in.

    Args:
        decision: the decision on a mitigation.
    """
    artifact, target = built.artifact, built.target
    plugin = artifact.plugin.engine if artifact.plugin is not None else None
    known = plugin is None or bool(plugin.int8.saturation)
    if not known or not kernels_saturate(target, artifact.scheme, plugin):
        return None
    if decision is not None and decision.chosen.scheme == decision.mitigations[0].scheme:
        found = decision.audit
    else:
        settings = artifact.settings() if plugin is None else graph_settings(artifact.settings())
        found = audit(artifact.model, settings, table=kernel_table(target, plugin))
    return ArtifactCheck(
        "saturation", "modelled", "the weights, and a model of the kernels", found.summary(), found.safe
    )


def refuse_left_out(target: Target, artifact: Artifact) -> None:
    """Refuse an artifact that the runner on the target would skip because the target's onnxruntime is older than any
    release that was tested.

    Raises:
        CheckFailedError: the artifact is refused. The message names both releases.
    """
    device, oldest = target.runtime.get("onnxruntime"), artifact.min_onnxruntime or target.profile.min_onnxruntime
    if device is not None and parse_version(device) < parse_version(oldest):
        raise CheckFailedError(
            f"{target.name}: onnxruntime {device} is older than {oldest}, the oldest that this kind of model is known "
            "to work with, so the runner there would leave it out",
            "Update onnxruntime there and correct [runtime] in the target's file, or set min_onnxruntime in it",
        )


def check_engines(engines: Sequence[EngineChoice], targets: Sequence[Target]) -> tuple[EngineChoice, ...]:
    """Return the plug-ins among `engines` without duplicates. Leave out onnxruntime's own kernels, because every bundle
    contains a variant for them.

    Raises:
        UsageError: an engine supports none of `targets`, or the runner on devices does not support the engine.
        RuntimeUnavailableError: an engine cannot be used here. The error shows the command that helps.
    """
    plugins = tuple({choice.name: choice for choice in engines if choice.engine.module}.values())
    for choice in plugins:
        if plugin_of(choice.engine.provider) is None:
            raise UsageError(f"the runner on devices does not know the engine {choice.name}", "Leave --engine out")
        if not any(exists_for(choice.engine, target) for target in targets):
            named = ", ".join(target.name for target in targets)
            raise UsageError(f"there is no {choice.engine.name} for {named}", "Leave --engine out")
        with device_errors():
            find_library(choice.engine, str(onnxruntime().__version__))
    return plugins


def exists_for(engine: Engine, target: Target) -> bool:
    """Return whether `engine` supports the kind of processor and the architecture of `target`."""
    if not backend_named(target.backend).runs_engines:
        return False
    kind = "CPU" if target.profile.min_compute_capability is None else "GPU"
    made_for = {platform.split()[1] for platform in engine.platforms}
    return kind in engine.devices and (not made_for or target.architecture in made_for)


def in_engine(
    builds: Builds,
    variant: ProvenVariant,
    choice: EngineChoice,
    decision: Decision | None = None,
) -> ProvenVariant:
    """Return the model of `variant`, proven in `choice`.

    Args:
        decision: the decision on a mitigation of saturation in that engine.

    Raises:
        EngineError: the engine crashes, hangs or does not accept the model.
    """
    built = dataclasses.replace(variant.built, artifact=variant.built.artifact.in_engine(choice))
    proof = builds.prove(built, variant.scheme, native=variant.native)
    where = f"{choice.name} on this machine" + ("" if variant.native else ", not on the target's kernels")
    kind: CheckKind = "native" if variant.native else "none"
    load, coverage, *others = _checks(proof, dict.fromkeys(_MADE, (kind, where)), saturation_check(built, decision))
    runtime = [check for check in variant.checks if check.name == "runtime"]
    checks = (load, coverage, *others, *runtime)
    return dataclasses.replace(variant, built=built, proof=proof, checks=checks, decision=decision)


_KINDS: Mapping[str, CheckKind] = {NATIVE: "native", EMULATED: "emulated", MODELLED: "modelled", NOT_RUN: "none"}
# Number of multiply-accumulates that an emulated CPU computes in a minute or two. An emulated CPU is about a hundred
# times slower than a real one.
_MACS = 4_000_000_000
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
    route = route_for(built.target, machine, built.artifact.settings().engine, simulators=SIMULATORS, progress=progress)
    count = _count(job, coverage, route)
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
    found = check_trial(trial, built.target, machine, route=route, progress=progress)
    found.check()
    return found


def checks_of(found: EmulatedCheck) -> tuple[ArtifactCheck, ...]:
    """Return the result of a check on the target's kernels as entries for the list of checks."""
    kind = _KINDS[found.where]
    if kind == "none":
        return (ArtifactCheck("kernels", kind, found.how, found.reason),)
    checks = [ArtifactCheck("load", kind, found.how, "", True), ArtifactCheck("self-test", kind, found.how, "", True)]
    if found.agreement is not None:
        detail = f"SQNR {found.agreement.sqnr_db:.1f} dB on {found.samples} samples"
        checks.append(ArtifactCheck("accuracy", kind, found.how, detail, True))
    return tuple(checks)


def _count(job: Job, coverage: Coverage, route: ExecutionRoute) -> int:
    """Return how many samples to compare: as many as an emulated CPU runs in a minute or two."""
    if route.native_speed:
        return _MOST_AT_NATIVE_SPEED
    macs = coverage.int8_macs + coverage.float_macs or sum(node_macs(job.prepared.model).values())
    return max(1, min(_MOST, _MACS // max(macs, 1)))


def verify_request(bundle: Path, variant: str | None, options: Mapping[str, Any]) -> VerifyRequest:
    """Return the request that the flat options of `edgeq verify --on` describe.

    Raises:
        UsageError: --max-drop is given without --task.
    """
    named, _ = split_task_options(options)
    same = {name: options[name] for name in ("on", "data", "count", "preprocess", "labels", "task", "expect")}
    drop = parse_drop(options["max_drop"])
    if drop is not None and options["task"] is None:
        raise UsageError("--max-drop needs a task that measures accuracy", "Give --task and labelled --data")
    return VerifyRequest(bundle, variant=variant, options=named, max_drop=drop, **same)


def refuse_without_target(options: Mapping[str, Any]) -> None:
    """Refuse options for the comparison with a target if no target is named.

    Raises:
        UsageError: such an option is given but no target.
    """
    given = next((name for name, value in options.items() if value not in (None, ())), None)
    if given is not None:
        raise UsageError(f"⟨{given}⟩ is for checks on another target's kernels", "Name the target with --on")
