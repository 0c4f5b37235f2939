"""Proven variants of one job, written as one bundle with its report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.engines import engine_options
from edgeq_device.version import parse_version

from edgeq.backends import Alternative, Artifact
from edgeq.bundle.weights import share_weights
from edgeq.bundle.write import BundleSpec, SelfTestCase, VariantSpec, write_bundle
from edgeq.calibrate.ranges import derive_ranges
from edgeq.calibrate.table import write_tables
from edgeq.calibrate.tensors import quantizable_tensors
from edgeq.data.samples import Samples
from edgeq.display import Displayed
from edgeq.emulate.check import EmulatedCheck
from edgeq.hardware.target import THIS_MACHINE, Target
from edgeq.measure.checks import Check, summarise
from edgeq.measure.coverage import Coverage
from edgeq.model.compatibility import Compatibility
from edgeq.model.load import model_bytes, model_digest, read_model
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.saturation_mitigation import Decision
from edgeq.pipeline.selftest import expected_outputs, selftest_cases
from edgeq.progress import SILENT, Progress
from edgeq.records import plain, rounded
from edgeq.report.histograms import quantized_tensors, worst_tensors
from edgeq.report.layers import layer_record
from edgeq.report.record import DEVICE_COMMANDS, DIGITS, TUNING, make_record, report_files


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


def bundle_variants(
    job: Job,
    variants: Mapping[str, PackagedVariant],
    output: Path,
    *,
    workdir: Path,
    command: str,
    selftest: int = 2,
    with_float: bool = False,
    tuning: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    force: bool = False,
    progress: Progress = SILENT,
) -> None:
    """Write proven variants of one job as a bundle with its report.

    Args:
        variants: by name, in the order of the package.
        workdir: a private folder, for the calibration tables.
        command: what makes such a bundle, for the report's reader.
        tuning: the record of the search that chose them (docs/tune.md), which travels as tuning.json.
        notes: for the report.
        Others as `edgeq.package`.
    """
    extras = report_files(_report_record(job, variants, command, notes, progress), tuning)
    models = share_weights({name: v.built.artifact.model for name, v in variants.items()}, workdir / "shared")
    cases = {
        key: selftest_cases(variant.built.artifact, job.validation, selftest)
        for key, variant in {_answers(variant): variant for variant in variants.values()}.items()
    }
    if tuning is not None:
        extras[TUNING] = (json.dumps(tuning, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()
    stand_ins = {a.name: a for variant in variants.values() for a in variant.built.artifact.alternatives}
    for name, variant in variants.items():
        extras.update({f"{name}.{file.name}": file.read_bytes() for file in variant.built.artifact.tables})
    spec = BundleSpec(
        name=as_text(job.source.stem),
        variants=(
            *(
                _variant(name, variant, job, cases[_answers(variant)], models[name])
                for name, variant in variants.items()
            ),
            *(_alternative(stand_ins[name], job, selftest) for name in sorted(stand_ins) if name not in variants),
        ),
        calibration=_tables(job, workdir / "tables"),
        metadata={
            "source_model_sha256": model_digest(job.source),
            **_licence(job),
            "calibration_sha256": job.statistics.data_digest if job.statistics else "",
            "calibration_samples": job.statistics.samples if job.statistics else 0,
        },
        float_model=job.prepared.path if with_float else None,
        extras=extras,
    )
    write_bundle(spec, output, force=force)


def as_text(name: str) -> str:
    """A file name as text that UTF-8 can hold."""
    return os.fsencode(name).decode("utf-8", "replace")


def _report_record(
    job: Job, variants: Mapping[str, PackagedVariant], command: str, notes: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """What the bundle keeps for its report: nothing that another run on the same input would measure otherwise."""
    digests = {name: model_digest(variant.built.artifact.model) for name, variant in variants.items()}
    once = {digest: variants[name] for name, digest in digests.items()}
    figures = {digest: _figures(job, variant.built, progress) for digest, variant in once.items()}
    bodies = {}
    for name, variant in variants.items():
        built, body = variant.built, plain(variant)
        del body["speed"]
        body["warnings"] = list(variant.proof.warnings(timed=False))
        body["checked"] = summarise(variant.checks)
        body["16-bit sums"] = variant.decision.why if variant.decision else None
        bodies[name] = {**body, "title": built.target.title, **figures[digests[name]]}
    return make_record(
        as_text(job.source.stem),
        bodies,
        model={"sha256": model_digest(job.source), "bytes": model_bytes(job.source)},
        commands=[command, *DEVICE_COMMANDS],
        notes=notes,
    )


def _answers(variant: PackagedVariant) -> tuple[Path, str]:
    """What decides the self-test's outputs: the model, which several targets may share, and the plug-in."""
    plugin = variant.built.artifact.plugin
    return variant.built.artifact.model, plugin.name if plugin is not None else ""


def _figures(job: Job, built: Built, progress: Progress) -> dict[str, Any]:
    """What the report draws of one artifact's tensors and layers, which onnxruntime's own kernels run."""
    artifact = dataclasses.replace(built.artifact, engine=None)
    histograms = []
    if job.statistics is not None and built.ranges:
        among = quantized_tensors(read_model(artifact.model))
        histograms = worst_tensors(job.statistics, built.ranges, artifact.scheme, among=among)
    layers = layer_record(
        job.prepared.path, artifact.proof_model, job.validation, artifact.proof_settings(), progress=progress
    )
    return {"histograms": histograms, "layers": layers}


def _variant(
    name: str, variant: PackagedVariant, job: Job, cases: tuple[SelfTestCase, ...], model: Path
) -> VariantSpec:
    built, proof = variant.built, variant.proof
    target, artifact = built.target, built.artifact
    cases, allowed = expected_outputs(
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
        selftest=cases,
        tolerance=allowed,
        files=artifact.files,
    )


def _engine(artifact: Artifact) -> tuple[str, Mapping[str, str], dict[str, str]]:
    """Provider, its options, and what a variant's info says of the engine. edgeq's runner has a plug-in's options from
    its description; ONNX Runtime's own reader of packages has them from the bundle."""
    plugin = artifact.plugin
    if plugin is None:
        return artifact.provider, artifact.provider_options, {}
    options = engine_options(plugin.engine, plugin.precision)
    return plugin.engine.provider, options, {"engine": plugin.engine.name, "precision": plugin.precision}


def _alternative(alternative: Alternative, job: Job, selftest: int) -> VariantSpec:
    """The variant of an artifact that stands in for another, once a bundle: every target's is the same."""
    artifact = alternative.artifact
    cases = selftest_cases(artifact, job.validation, selftest)
    modelled = artifact.simulation is not None
    cases, allowed = expected_outputs(cases, None, job.prepared.path, native=not modelled, simulated=modelled)
    ep, options, engine = _engine(artifact)
    simulated = modelled or bool(engine)
    where = "in simulation on a CPU" if simulated else "this machine"
    checks = [Check(name, "modelled" if simulated else "native", where, "", True) for name in ("load", "self-test")]
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
        selftest=cases,
        tolerance=allowed,
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


def _tables(job: Job, folder: Path) -> Path | None:
    """The three calibration tables, by absolute maximum, whatever method the variants use: what they record is what
    was seen."""
    if job.statistics is None:
        return None
    folder.mkdir()
    tensors = quantizable_tensors(job.prepared.model)
    write_tables(folder, derive_ranges(job.statistics, "minmax"), tensors=tensors)
    return folder


def _licence(job: Job) -> dict[str, str]:
    """The model's licence, where its metadata has one."""
    held = {key.lower(): value.strip() for key, value in job.prepared.model.metadata_props.items()}
    licence = held.get("license") or held.get("licenses") or held.get("licence")
    return {"license": licence} if licence else {}


def _preprocessing(samples: Samples) -> dict[str, Any] | None:
    preprocess = getattr(samples, "preprocess", None)
    return plain(preprocess) if preprocess is not None else None
