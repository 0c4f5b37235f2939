"""Choose the checks of a variant that apply to its target, and record how each check was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from edgeq_device.engines.catalog import parse_version

from edgeq.backends.base import Artifact
from edgeq.emulate.audit import audit, build_graph_settings
from edgeq.errors import CheckFailedError
from edgeq.hardware.detect import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.checks import ArtifactCheck, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.prove.builds import Builds, kernels_saturate
from edgeq.prove.job import Built
from edgeq.prove.proof import Proof
from edgeq.prove.saturation import Decision, kernel_table
from edgeq.prove.variants import ProvenVariant
from edgeq.run.engines import EngineChoice

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
    sources: dict[str, tuple[CheckKind, str]] = dict.fromkeys(_MADE, ("none", _FOREIGN))
    if runs_natively(target, machine):
        sources = dict.fromkeys(_MADE, ("native", "this machine"))
    elif artifact.coverage is not None:
        location = artifact.coverage.how if artifact.plugin is not None else _MODEL
        sources = dict.fromkeys(_MADE, ("modelled", location))
        sources["load"] = (
            sources["load"] if artifact.plugin is not None else ("none", "the target's runtime is not on this machine")
        )
        saturation = None
    elif saturation is not None and saturation.passed and target.architecture == machine.architecture:
        sources |= dict.fromkeys(_MADE[1:], ("modelled", _EXACT))
    return _checks(proof, sources, saturation)


def _checks(
    proof: Proof, sources: Mapping[str, tuple[CheckKind, str]], saturation: ArtifactCheck | None
) -> tuple[ArtifactCheck, ...]:
    """Return the checks that a proof contains, each with its kind and the place where it was made."""
    details = {"accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples"}
    load, *further = (
        ArtifactCheck(name, kind, location, details.get(name, ""), None if kind == "none" else True)
        for name, (kind, location) in sources.items()
    )
    return (load, coverage_check(proof.coverage), *further, *([saturation] if saturation else []))


def coverage_check(coverage: Coverage) -> ArtifactCheck:
    """Return the coverage as a check."""
    if coverage.basis in ("native", "emulated", "modelled"):
        return ArtifactCheck("coverage", coverage.basis, coverage.how, coverage.summary(), True)
    return ArtifactCheck("coverage", "none", coverage.how, coverage.summary())


def saturation_check(built: Built, decision: Decision | None) -> ArtifactCheck | None:
    """Use the weights to check whether sums of two products saturate in 16 bits. Return None if the artifact's kernels
    do not add in 16 bits, or if nothing is known about the kernels of its plug-in.

    Args:
        decision: the decision on a mitigation.
    """
    artifact, target = built.artifact, built.target
    plugin = artifact.plugin.engine if artifact.plugin is not None else None
    is_known = plugin is None or bool(plugin.int8.saturation)
    # Nothing can be said about kernels that nobody described.
    if not is_known or not kernels_saturate(target, artifact.scheme, plugin):
        return None
    if decision is not None and decision.chosen.scheme == decision.mitigations[0].scheme:
        # The decision has audited the full range, which is what was built.
        audit_result = decision.audit
    else:
        settings = artifact.settings() if plugin is None else build_graph_settings(artifact.settings())
        audit_result = audit(artifact.model, settings, table=kernel_table(target, plugin))
    return ArtifactCheck(
        "saturation", "modelled", "the weights, and a model of the kernels", audit_result.summary(), audit_result.safe
    )


def refuse_left_out(target: Target, artifact: Artifact) -> None:
    """Refuse an artifact that the runner on the target would skip because the target's onnxruntime is older than any
    release that was tested.

    Raises:
        CheckFailedError: the artifact is refused. The message names both releases.
    """
    device, oldest = target.runtime.get("onnxruntime"), artifact.min_onnxruntime or target.profile.min_onnxruntime
    # Without a known release, the runner on the target decides when it opens the bundle.
    if device is not None and parse_version(device) < parse_version(oldest):
        raise CheckFailedError(
            f"{target.name}: onnxruntime {device} is older than {oldest}, the oldest that this kind of model is known "
            "to work with, so the runner there would leave it out",
            "Update onnxruntime there and correct [runtime] in the target's file, or set min_onnxruntime in it",
        )


def prove_in_engine(
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
    location = f"{choice.name} on this machine" + ("" if variant.native else ", not on the target's kernels")
    kind: CheckKind = "native" if variant.native else "none"
    load, coverage, *further = _checks(proof, dict.fromkeys(_MADE, (kind, location)), saturation_check(built, decision))
    # This check is about the target, so it holds in every engine.
    runtime = [check for check in variant.checks if check.name == "runtime"]
    checks = (load, coverage, *further, *runtime)
    return dataclasses.replace(variant, built=built, proof=proof, checks=checks, decision=decision)
