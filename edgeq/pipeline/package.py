"""`edgeq package`: quantize for one or more targets and write one bundle."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.atomic import check_free
from edgeq.bundle.write import BundleSpec, SelfTestCase, VariantSpec, write_bundle
from edgeq.calibrate.ranges import derive_ranges
from edgeq.calibrate.table import write_tables
from edgeq.data.samples import Samples
from edgeq.errors import OutputError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import THIS_MACHINE, Target, resolve
from edgeq.measure.task import Task
from edgeq.model.load import model_digest
from edgeq.pipeline.job import Built, Data, Job, build, open_job, scheme_for
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.quantize import model_bytes, prove_built, runs_natively
from edgeq.progress import SILENT, Progress
from edgeq.session import open_session

# Two architectures round differently: up to 1.6 % of an output's largest value was seen between x86 and ARM on the same
# integers (requantization and QLinearAdd). A wrong kernel, one that saturates, is off by far more.
_SELFTEST_TOLERANCE = 0.025


@dataclass(frozen=True)
class PackagedVariant:
    """One variant: what was built, its proof, whether that was taken on the target's own kernels, and its size.

    `threads` are those that suit it, which the runner takes where it is told none; 0 leaves it to the runtime.
    """

    built: Built
    proof: Proof
    native: bool
    bytes: int
    threads: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.built.target.name,
            "profile": self.built.target.profile.name,
            "scheme": self.built.artifact.scheme.to_dict(),
            "session_options": dict(self.built.artifact.session_options),
            "bytes": self.bytes,
            "native": self.native,
            **self.proof.to_dict(),
        }


@dataclass(frozen=True)
class Packaged:
    """What `package` did: the bundle and its variants by name."""

    bundle: Path
    variants: Mapping[str, PackagedVariant]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle),
            "variants": {name: variant.to_dict() for name, variant in self.variants.items()},
            "notes": list(self.notes),
        }


def package(
    model: Path,
    data: Data | None,
    output: Path,
    *,
    targets: Sequence[str | Path] = ("this-machine",),
    validation: Data | None = None,
    statistics: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    task: Task | None = None,
    max_drop: float | None = None,
    require_coverage: float | None = None,
    with_float: bool = False,
    selftest: int = 2,
    timed: bool = True,
    force: bool = False,
    progress: Progress = SILENT,
) -> Packaged:
    """Calibrate `model` once, build and prove a variant for each target, and write them as one bundle.

    Args:
        output: a directory, or a file that ends in ".edgeq".
        targets: names of targets or profiles, or paths to TOML files; the order does not matter.
        with_float: put the float32 model in too, so that the device can time both.
        selftest: how many samples travel as self-test vectors.
        Others as `quantize`.

    Raises:
        CheckFailedError: a bar is not met by some variant; nothing is written then.
        EdgeqError: as the stages have it.
    """
    check_free(output, force=force)
    check_replaceable(output)
    machine = detect_machine()
    chosen = _in_package_order([resolve(target, machine) for target in targets])
    overrides = dict(overrides or {})
    static = any(scheme_for(target, overrides).mode == "static" for target in chosen)
    with tempfile.TemporaryDirectory(prefix="edgeq-") as folder:
        workdir = Path(folder)
        job = open_job(model, data, validation, workdir, statistics=statistics, static=static, progress=progress)
        done: dict[str, PackagedVariant] = {}
        for target in chosen:
            name = variant_name(target)
            place = workdir / name
            place.mkdir()
            built = build(job, target, overrides, place / "model.onnx")
            runnable = not target.profile.missing(machine)
            proof = prove_built(job, built, task=task, timed=timed and runnable, progress=progress)
            proof.check(max_drop=max_drop, require_coverage=require_coverage)
            done[name] = PackagedVariant(
                built, proof, runs_natively(target, machine), model_bytes(built.artifact.model)
            )
        bundle_variants(job, done, output, workdir=workdir, selftest=selftest, with_float=with_float, force=force)
    notes = [*job.prepared.notes, *itertools.chain.from_iterable(v.built.artifact.notes for v in done.values())]
    return Packaged(output, done, tuple(dict.fromkeys(notes)))


def variant_name(target: Target) -> str:
    """What a target's variant is called; "this machine" means nothing elsewhere, so its profile stands for it."""
    return target.profile.name if target.name == THIS_MACHINE else target.name


def bundle_variants(
    job: Job,
    variants: Mapping[str, PackagedVariant],
    output: Path,
    *,
    workdir: Path,
    selftest: int = 2,
    with_float: bool = False,
    extras: Mapping[str, bytes] | None = None,
    force: bool = False,
) -> None:
    """Write proven variants of one job as a bundle.

    Args:
        variants: by name, in the order of the package.
        workdir: a private folder, for the calibration tables.
        extras: further files that stand beside the manifest, by name.
        Others as `package`.
    """
    spec = BundleSpec(
        name=job.source.stem,
        variants=tuple(_variant(name, variant, job, selftest) for name, variant in variants.items()),
        calibration=_tables(job, workdir / "tables"),
        metadata={
            "source_model_sha256": model_digest(job.source),
            "calibration_sha256": job.statistics.data_digest if job.statistics else "",
            "calibration_samples": job.statistics.samples if job.statistics else 0,
        },
        float_model=job.prepared.path if with_float else None,
        extras=extras or {},
    )
    write_bundle(spec, output, force=force)


def check_replaceable(output: Path) -> None:
    """Refuse, with --force too, to replace a folder that is no bundle: it may hold anything."""
    if output.is_dir() and any(output.iterdir()) and not (output / "manifest.json").is_file():
        raise OutputError(f"{output} holds files and is no bundle", "Choose another output, or remove it yourself")


def _in_package_order(targets: Sequence[Target]) -> list[Target]:
    """Least demanding first: ONNX Runtime itself takes the first variant that fits, edgeq's runner the best."""
    names = [variant_name(target) for target in targets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UsageError(f"target {repeated} is named twice", "Name each target once")
    return sorted(targets, key=lambda target: (target.architecture, target.profile.rank, target.name))


def _variant(name: str, variant: PackagedVariant, job: Job, selftest: int) -> VariantSpec:
    built, proof = variant.built, variant.proof
    target, artifact = built.target, built.artifact
    cases = _selftest_cases(built, job.validation, selftest)
    where = "natively" if variant.native else "on the build machine's kernels, not the target's"
    return VariantSpec(
        name=name,
        model=artifact.model,
        ep=artifact.provider,
        session_options=artifact.session_options,
        provider_options=artifact.provider_options,
        info={
            "title": target.title,
            "target": target.name,
            "profile": target.profile.name,
            "architecture": target.architecture,
            "required_features": sorted(target.profile.requires),
            "rank": target.profile.rank,
            "min_onnxruntime": artifact.min_onnxruntime or target.profile.min_onnxruntime,
            "scheme": artifact.scheme.to_dict(),
            "preprocessing": _preprocessing(job.validation),
            "coverage": {"int8_mac_share": round(proof.coverage.share, 4)},
            "accuracy": _accuracy(proof),
            "checks": dict.fromkeys(("load", "coverage", "accuracy", "self-test"), where),
            **({"threads": variant.threads} if variant.threads else {}),
        },
        selftest=cases,
        tolerance=_tolerance(cases),
    )


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


def _selftest_cases(built: Built, samples: Samples, count: int) -> tuple[SelfTestCase, ...]:
    session = open_session(built.artifact.model, built.artifact.settings())
    names = [output.name for output in session.get_outputs()]
    return tuple(
        SelfTestCase(dict(sample.inputs), dict(zip(names, session.run(None, dict(sample.inputs)), strict=True)))
        for sample in itertools.islice(samples, count)
    )


def _tolerance(cases: Sequence[SelfTestCase]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for case in cases:
        for name, value in case.outputs.items():
            magnitude = float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind == "f" else 0.0
            largest[name] = max(largest.get(name, 0.0), magnitude)
    return {name: _SELFTEST_TOLERANCE * magnitude for name, magnitude in largest.items()}


def _tables(job: Job, folder: Path) -> Path | None:
    """The three calibration tables, by absolute maximum, whatever method the variants use: what they record is what
    was seen."""
    if job.statistics is None:
        return None
    folder.mkdir()
    write_tables(folder, derive_ranges(job.statistics, "minmax"))
    return folder


def _preprocessing(samples: Samples) -> dict[str, Any] | None:
    preprocess = getattr(samples, "preprocess", None)
    return preprocess.to_dict() if preprocess is not None else None
