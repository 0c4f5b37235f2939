"""Proven variants of one job, written as one bundle with its report."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeq.bundle.weights import share_weights
from edgeq.bundle.write import BundleSpec, write_bundle
from edgeq.calibrate.ranges import Range
from edgeq.measure.checks import summarise
from edgeq.model.load import model_bytes, model_digest, read_model
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.selftest import selftest_cases
from edgeq.pipeline.variant_tables import variant_ranges, write_variant_tables
from edgeq.pipeline.variants import PackagedVariant, alternative_spec, variant_spec
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.report.histograms import quantized_tensors, worst_tensors
from edgeq.report.layers import layer_record
from edgeq.report.record import DEVICE_COMMANDS, TUNING, make_record, report_files


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
    builds = {name: variant.built for name, variant in variants.items()}
    used = variant_ranges(job, builds)
    extras = report_files(_report_record(job, variants, used, command, notes, progress), tuning)
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
    tables = write_variant_tables(job, builds, used, workdir / "tables")
    spec = BundleSpec(
        name=as_text(job.source.stem),
        variants=(
            *(
                variant_spec(name, variant, job, cases[_answers(variant)], models[name], tables.get(name))
                for name, variant in variants.items()
            ),
            *(alternative_spec(stand_ins[name], job, selftest) for name in sorted(stand_ins) if name not in variants),
        ),
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
    job: Job,
    variants: Mapping[str, PackagedVariant],
    used: Mapping[str, Mapping[str, Range]],
    command: str,
    notes: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """What the bundle keeps for its report: nothing that another run on the same input would measure otherwise."""
    digests = {name: model_digest(variant.built.artifact.model) for name, variant in variants.items()}
    once = {digest: name for name, digest in digests.items()}
    figures = {d: _figures(job, variants[name].built, used.get(name, {}), progress) for d, name in once.items()}
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


def _figures(job: Job, built: Built, ranges: Mapping[str, Range], progress: Progress) -> dict[str, Any]:
    """What the report draws of one artifact's tensors and layers, which onnxruntime's own kernels run."""
    artifact = dataclasses.replace(built.artifact, engine=None)
    histograms = []
    if job.statistics is not None and ranges:
        among = quantized_tensors(read_model(artifact.model))
        histograms = worst_tensors(job.statistics, ranges, artifact.scheme, among=among)
    layers = layer_record(
        job.prepared.path, artifact.proof_model, job.validation, artifact.proof_settings(), progress=progress
    )
    return {"histograms": histograms, "layers": layers}


def _licence(job: Job) -> dict[str, str]:
    """The model's licence, where its metadata has one."""
    held = {key.lower(): value.strip() for key, value in job.prepared.model.metadata_props.items()}
    licence = held.get("license") or held.get("licenses") or held.get("licence")
    return {"license": licence} if licence else {}
