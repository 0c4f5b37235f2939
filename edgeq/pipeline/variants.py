"""Proven variants of one job, and what a bundle's manifest says of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.engines import engine_options
from edgeq_device.version import parse_version

from edgeq.backends import Alternative, Artifact
from edgeq.bundle.write import SelfTestCase, VariantSpec
from edgeq.data.samples import Samples
from edgeq.display import Displayed
from edgeq.emulate.check import EmulatedCheck
from edgeq.hardware.target import THIS_MACHINE, Target
from edgeq.measure.checks import Check, CheckKind
from edgeq.measure.coverage import Coverage
from edgeq.model.compatibility import Compatibility
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.opening import open_stand_in
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.saturation_mitigation import Decision
from edgeq.pipeline.selftest import expected_outputs, selftest_cases
from edgeq.records import plain, rounded
from edgeq.report.record import DIGITS


@dataclass(frozen=True)
class PackagedVariant(Displayed):
    """One variant: what was built, its proof, whether that was taken on the target's own kernels, and its size.

    Attributes:
        threads: those that suit it, the runner's default; 0 leaves it to the runtime.
        checks: what was checked on whose kernels, one of each name.
        decision: what was done about saturating kernels, and why; None where there was nothing to decide.
        compatibility: what it needs of onnxruntime; None where that is not looked up.
        emulated: the check on the target's own kernels, where this machine's are others; None where none was made.
        preference: among the variants of one profile, the highest that a device can run wins; see `with_fallback`.
    """

    built: Built
    proof: Proof
    native: bool
    bytes: int
    threads: int = 0
    checks: tuple[Check, ...] = ()
    decision: Decision | None = None
    compatibility: Compatibility | None = None
    emulated: EmulatedCheck | None = None
    preference: int = 0

    def __brief__(self) -> dict[str, Any]:
        artifact = self.built.artifact
        known = {"target": self.built.target.name, "scheme": artifact.scheme.title, "bytes": self.bytes}
        return {**known, "native": self.native, **self.proof.__brief__()}

    @property
    def min_onnxruntime(self) -> str:
        """The oldest onnxruntime that is known to run it."""
        known = [self.built.artifact.min_onnxruntime or self.built.target.profile.min_onnxruntime]
        known += [self.compatibility.minimum] if self.compatibility else []
        plugin = self.built.artifact.plugin
        known += [plugin.engine.min_onnxruntime] if plugin is not None and plugin.engine.min_onnxruntime else []
        return max(known, key=parse_version)

    def __record__(self) -> dict[str, Any]:
        return {
            "target": self.built.target.name,
            "profile": self.built.target.profile.name,
            "scheme": self.built.artifact.scheme,
            "session_options": self.built.artifact.session_options,
            "bytes": self.bytes,
            "native": self.native,
            "checks": self.checks,
            "min_onnxruntime": self.min_onnxruntime,
            "saturation": self.decision,
            "emulated": self.emulated,
            **plain(self.proof),
        }


def variant_name(target: Target) -> str:
    """What a target's variant is called; "this machine" means nothing elsewhere, so its profile stands for it."""
    return target.profile.name if target.name == THIS_MACHINE else target.name


def with_fallback(
    name: str, fallback: PackagedVariant, preferred: Sequence[PackagedVariant]
) -> dict[str, PackagedVariant]:
    """Variants for one target by name: `fallback`, which needs nothing but onnxruntime, then those of plug-in engines.

    Args:
        preferred: the best first; a device takes the first whose engine is installed and right there.
    """
    found = {name: fallback}
    for place, variant in enumerate(preferred):
        plugin = variant.built.artifact.plugin
        assert plugin is not None, "what onnxruntime runs by itself is the fall-back"
        own = f"{name}-{plugin.name.replace(':', '-')}"
        found[own] = dataclasses.replace(variant, preference=len(preferred) - place)
    return found


def variant_spec(
    name: str,
    variant: PackagedVariant,
    job: Job,
    cases: tuple[SelfTestCase, ...],
    model: Path,
    tables: Path | None = None,
) -> VariantSpec:
    """Describe a variant for the bundle.

    Args:
        cases: its self-test's.
        model: its file.
        tables: the folder with the calibration tables of its ranges.
    """
    built, proof = variant.built, variant.proof
    target, artifact = built.target, built.artifact
    vectors = expected_outputs(
        cases,
        variant.emulated,
        job.prepared.path,
        native=variant.native,
        simulated=artifact.simulation is not None,
    )
    ep, options, engine = _engine(artifact)
    return VariantSpec(
        name=name,
        model=model,
        ep=ep,
        device=artifact.device,
        session_options=artifact.session_options,
        provider_options=options,
        info={
            **artifact.requires,
            **({"table_file": f"{name}.{artifact.requires['table']}"} if "table" in artifact.requires else {}),
            "title": target.title,
            "target": target.name,
            "profile": target.profile.name,
            **engine,
            "architecture": target.architecture,
            "required_features": sorted(target.profile.requires),
            "rank": target.profile.rank + variant.preference,
            "min_onnxruntime": variant.min_onnxruntime,
            **({"products": list(variant.compatibility.products)} if variant.compatibility else {}),
            "scheme": plain(artifact.scheme),
            "preprocessing": _preprocessing(job.validation),
            "coverage": _coverage(proof.coverage),
            "accuracy": _accuracy(proof),
            "checks": [plain(check) for check in variant.checks],
            **({"saturation": rounded(plain(variant.decision), DIGITS)} if variant.decision else {}),
            **({"threads": variant.threads} if variant.threads else {}),
            **({"files": sorted(artifact.files)} if artifact.files else {}),
        },
        selftest=vectors.cases,
        tolerance=vectors.tolerance,
        slices=vectors.slices,
        files=artifact.files,
        calibration=tables,
    )


def _engine(artifact: Artifact) -> tuple[str, Mapping[str, str], dict[str, str]]:
    """Provider, its options, and what a variant's info says of the engine. edgeq's runner has a plug-in's options from
    its description; ONNX Runtime's own reader of packages has them from the bundle."""
    plugin = artifact.plugin
    if plugin is None:
        return artifact.provider, artifact.provider_options, {}
    options = engine_options(plugin.engine, plugin.precision)
    return plugin.engine.provider, options, {"engine": plugin.engine.name, "precision": plugin.precision}


def alternative_spec(alternative: Alternative, job: Job, selftest: int) -> VariantSpec:
    """The variant of an artifact that stands in for another, once a bundle: every target's is the same.

    Raises:
        CheckFailedError: its file answers otherwise when it is opened as devices open it.
    """
    artifact = alternative.artifact
    unopened = ""
    if artifact.plugin is None and artifact.model != job.prepared.path:  # what a plug-in compiled is compared there
        opening = open_stand_in(artifact, job.prepared.path, job.validation)
        opening.check(artifact.model)
        unopened = "; ".join(opening.notes)
    cases = selftest_cases(artifact, job.validation, selftest)
    modelled = artifact.simulation is not None
    vectors = expected_outputs(cases, None, job.prepared.path, native=not modelled, simulated=modelled)
    ep, options, engine = _engine(artifact)
    simulated = modelled or bool(engine)
    where = "in simulation on a CPU" if simulated else "this machine"
    kind: CheckKind = "modelled" if simulated else "native"
    checks = [Check("load", kind, where, unopened, True), Check("self-test", kind, where, "", True)]
    return VariantSpec(
        name=alternative.name,
        model=artifact.model,
        ep=ep,
        device=artifact.device,
        session_options=artifact.session_options,
        provider_options=options,
        info={
            **artifact.requires,
            **engine,
            "title": alternative.title,
            "architecture": alternative.architecture,
            "required_features": [],
            "rank": alternative.rank,
            "min_onnxruntime": artifact.min_onnxruntime,
            "scheme": artifact.scheme.rest,
            "preprocessing": _preprocessing(job.validation),
            "checks": [plain(check) for check in checks],
        },
        selftest=vectors.cases,
        tolerance=vectors.tolerance,
        slices=vectors.slices,
    )


def _coverage(found: Coverage) -> dict[str, Any]:
    """Coverage for the manifest: the share, null where it is unknown, and what it rests on."""
    share = None if found.int8_mac_share is None else round(found.int8_mac_share, 4)
    precisions = {"precisions": dict(found.precisions)} if found.precisions else {}
    return {"int8_mac_share": share, "basis": found.basis, "how": found.how, **precisions}


def _accuracy(proof: Proof) -> dict[str, Any]:
    """Accuracy for the manifest, rounded so that the last bit of a sum does not change the bundle."""
    record: dict[str, Any] = {"samples": proof.samples, "held_out": proof.held_out}
    if np.isfinite(proof.agreement.sqnr_db):
        record["sqnr_db"] = round(proof.agreement.sqnr_db, 1)
    if proof.agreement.top1 is not None:
        record["top1_agreement"] = round(proof.agreement.top1, 4)
    for name, accuracy in proof.accuracy.items():
        record[name] = {metric: round(value, 4) for metric, value in accuracy.metrics.items()}
    return record


def _preprocessing(samples: Samples) -> dict[str, Any] | None:
    preprocess = getattr(samples, "preprocess", None)
    return plain(preprocess) if preprocess is not None else None
