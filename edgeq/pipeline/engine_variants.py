"""Variants of a bundle that a plug-in engine runs, beside the one that needs nothing but onnxruntime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from edgeq_device.engines import find_library, plugin_of

from edgeq.device import device_errors
from edgeq.engines import Engine, EngineChoice
from edgeq.errors import UsageError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target
from edgeq.measure.checks import Check
from edgeq.pipeline.builds import Builds
from edgeq.pipeline.saturation_mitigation import Decision
from edgeq.pipeline.target_checks import coverage_check, saturation_check
from edgeq.pipeline.variants import PackagedVariant
from edgeq.scheme import Scheme
from edgeq.session import onnxruntime


def check_engines(engines: Sequence[EngineChoice], targets: Sequence[Target]) -> tuple[EngineChoice, ...]:
    """The plug-ins among `engines`, each once; onnxruntime's own kernels are in every bundle.

    Raises:
        UsageError: one that exists for none of `targets`, or that the runner on devices does not know.
        RuntimeUnavailableError: one that cannot be used here, with the command that helps.
    """
    plugins = tuple({choice.name: choice for choice in engines if choice.engine.module}.values())
    for choice in plugins:
        if plugin_of(choice.engine.provider) is None:
            raise UsageError(f"{choice.name} is not among the engines that devices know", "Leave --engine out")
        if not any(exists_for(choice.engine, target) for target in targets):
            named = ", ".join(target.name for target in targets)
            raise UsageError(f"there is no {choice.engine.name} for {named}", "Leave --engine out")
        with device_errors():
            find_library(choice.engine, str(onnxruntime().__version__))
    return plugins


def exists_for(engine: Engine, target: Target) -> bool:
    """Whether `engine` runs on the kind of processor that `target` is built for, and exists for its architecture."""
    kind = "CPU" if target.profile.min_compute_capability is None else "GPU"
    made_for = {platform.split()[1] for platform in engine.platforms}
    return kind in engine.devices and target.systolic == {} and (not made_for or target.architecture in made_for)


def in_engine(
    builds: Builds,
    variant: PackagedVariant,
    scheme: Scheme,
    choice: EngineChoice,
    machine: Machine,
    decision: Decision | None = None,
) -> PackagedVariant:
    """The model of `variant`, proven in `choice`.

    Args:
        decision: what was done about saturation in that engine.

    Raises:
        EngineError: the engine crashes, hangs or refuses the model.
    """
    built = dataclasses.replace(variant.built, artifact=variant.built.artifact.in_engine(choice))
    proof = builds.prove(built, scheme, machine, native=variant.native)
    where = f"{choice.name} on this machine" + ("" if variant.native else ", not on the target's kernels")
    found = {"load": "", "accuracy": f"SQNR {proof.agreement.sqnr_db:.1f} dB on {proof.samples} samples"}
    made = [
        Check(name, "native" if variant.native else "none", where, found.get(name, ""), variant.native or None)
        for name in ("load", "accuracy", "self-test")
    ]
    runtime = [check for check in variant.checks if check.name == "runtime"]
    saturation = saturation_check(built, decision)
    checks = (*made, coverage_check(proof.coverage), *([saturation] if saturation else []), *runtime)
    return dataclasses.replace(variant, built=built, proof=proof, checks=checks, decision=decision)
