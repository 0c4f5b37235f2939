"""Write the proven variants of one job as a bundle, with its report and calibration tables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.program import LABELS

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.weights import share_weights
from edgeq.bundle.write import write_bundle
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range, scheme_ranges
from edgeq.calibration.table import write_tables
from edgeq.measure.answer_task import judges_answers
from edgeq.measure.checks import summarise
from edgeq.measure.match_activations import match_activations
from edgeq.model.digests import model_digest
from edgeq.model.files import model_bytes
from edgeq.model.quant_params import QuantParams
from edgeq.model.sharing import shared_model
from edgeq.prove.job import Built, Job
from edgeq.prove.variants import ProvenVariant, alternative_spec, selftest_cases, variant_spec
from edgeq.reporting.layers import layer_record, quantized_tensors, worst_tensors
from edgeq.reporting.page import DEVICE_COMMANDS, make_record, report_files
from edgeq.reporting.pictures import draw_pictures
from edgeq.reporting.read import PicturePair
from edgeq.run.session import EngineFiles, open_session
from edgeq.util.records import plain


def used_ranges(job: Job, built: Built) -> dict[str, Range]:
    """Return the range of each tensor in an artifact. This is the range that the scale and zero point in the file
    represent. If the file has no scale for a tensor, because the file is a table for TensorRT or the tensor is in
    float, the range is the one from which the artifact was built.
    """
    file = shared_model(built.artifact.proof_model, job.prepared.graph)
    ranges = dict(built.ranges)
    for match in match_activations(job.prepared.graph, file):
        params, requested = match.params, ranges.get(match.name)
        if params is not None and not (requested is not None and _is_scale_of(params, requested)):
            ranges[match.name] = _represented(params)
    return ranges


def variant_ranges(job: Job, built: Mapping[str, Built]) -> dict[str, dict[str, Range]]:
    """Return the result of `used_ranges` for each variant that has ranges, keyed by the variant's name. If variants
    share a file, it is read only once.
    """
    static = {name: build for name, build in built.items() if build.ranges}
    files = {build.artifact.proof_model: build for build in static.values()}
    ranges_by_file = {file: used_ranges(job, build) for file, build in files.items()}
    return {name: ranges_by_file[build.artifact.proof_model] for name, build in static.items()}


def write_variant_tables(
    job: Job, built: Mapping[str, Built], used: Mapping[str, Mapping[str, Range]], folder: Path
) -> dict[str, Path]:
    """Write the calibration tables of each variant that has ranges. Variants with equal ranges share their tables.

    Args:
        built: the builds, keyed by the variant's name.
        used: the result of `variant_ranges`.
        folder: folder for the tables. This function creates it.

    Returns:
        The folder of each variant's tables, keyed by the variant's name.
    """
    if job.statistics is None:
        return {}
    folder.mkdir()
    tensors = quantizable_tensors(job.prepared.graph)
    tables: list[tuple[dict[str, Range], Path]] = []
    places = {}
    for name, ranges in used.items():
        # If a recovery rewrites the model, some tensors of the source have no range in the artifact.
        all_ranges = {**scheme_ranges(job.statistics, built[name].artifact.scheme), **ranges}
        table = {tensor: all_ranges[tensor] for tensor in job.statistics.tensors}
        place = next((place for content, place in tables if content == table), None)
        if place is None:
            place = folder / str(len(tables))
            write_tables(place, table, tensors=tensors)
            tables.append((table, place))
        places[name] = place
    return places


def _is_scale_of(params: QuantParams, span: Range) -> bool:
    """Return whether a scale was computed from a range. If so, that range is exact. By contrast, the range that the
    file's scale and zero point represent contains the rounding of the zero point.
    """
    steps = params.high - params.low
    # symmetric quantization does not use the smallest integer
    widths = float(params.scale.max()) * np.array([steps, steps - 1])
    return bool(np.isclose(widths, span.high - span.low, rtol=1e-5, atol=0.0).any())


def _represented(params: QuantParams) -> Range:
    """Return the range that the integers represent. For signed integers with zero point 0, this is the symmetric range
    for which the scale was chosen.
    """
    symmetric = params.low < 0 and not params.zero_point.any()
    low, high = (replace(params, narrow=True) if symmetric else params).range
    return Range(min(low, 0.0), max(high, 0.0))


@dataclass(frozen=True)
class BundleContents:
    """Choose what a bundle contains besides its variants.

    Attributes:
        selftest: number of samples to include as self-test vectors.
        with_float: whether to include the float32 model.
    """

    selftest: int = 2
    with_float: bool = False


def bundle_variants(
    job: Job,
    variants: Mapping[str, ProvenVariant],
    output: Path,
    *,
    workdir: Path,
    command: str,
    contents: BundleContents,
    tuning: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Write the proven variants of one job as a bundle with its report.

    Args:
        variants: the variants by name, in the order in which the bundle lists them.
        workdir: a private folder for the calibration tables.
        command: the command that makes this kind of bundle, shown in the report.
        tuning: the record of the search that chose the variants (docs/tune.md), for report.json.
        notes: notes for the report.
        force: replace an existing output.
    """
    builds = {name: variant.built for name, variant in variants.items()}
    used = variant_ranges(job, builds)
    record = _report_record(job, variants, used, command, notes)
    extras = report_files(record if tuning is None else {**record, "tuning": tuning})
    models = shipped_files({name: variant.built for name, variant in variants.items()}, workdir)
    # Variants that compute the same outputs share their test vectors, because these may be larger than the models.
    cases = {
        key: selftest_cases(variant.built.artifact, job.validation, contents.selftest)
        for key, variant in {_answers(variant): variant for variant in variants.values()}.items()
    }
    # Devices read one name a line.
    names = [re.sub(r"\s+", " ", as_text(name)) for name in _class_names(job)]
    if any(names):
        extras[LABELS] = "".join(f"{name}\n" for name in names).encode("utf-8")
    # Several variants may bring the same alternative, which is written once.
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
            *(
                alternative_spec(stand_ins[name], job, contents.selftest)
                for name in sorted(stand_ins)
                if name not in variants
            ),
        ),
        metadata={
            "source_model_sha256": model_digest(job.source),
            **_licence(job),
            "calibration_sha256": job.statistics.data_digest if job.statistics else "",
            "calibration_samples": job.statistics.samples if job.statistics else 0,
        },
        float_model=job.prepared.path if contents.with_float else None,
        extras=extras,
    )
    write_bundle(spec, output, force=force)


def shipped_files(builds: Mapping[str, Built], workdir: Path) -> dict[str, Path]:
    """Return the file of each variant, in the format of the engine that runs the variant. For onnxruntime, the file is
    the model itself. The models of a bundle share their weights.

    Args:
        workdir: a private folder for new files.
    """
    folder = workdir / "converted"
    folder.mkdir()
    files = EngineFiles(folder)
    models = {
        name: files.convert_once(build.artifact.model, build.artifact.settings().engine)
        for name, build in builds.items()
    }
    unconverted = {name: file for name, file in models.items() if file == builds[name].artifact.model}
    return {**models, **share_weights(unconverted, workdir / "shared")}


def as_text(name: str) -> str:
    """Return a file name as text that can be encoded as UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _report_record(
    job: Job,
    variants: Mapping[str, ProvenVariant],
    used: Mapping[str, Mapping[str, Range]],
    command: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the figures that the bundle stores for its report. They include no measurement that differs from run to
    run.
    """
    digests = {name: model_digest(variant.built.artifact.model) for name, variant in variants.items()}
    once = {digest: name for name, digest in digests.items()}
    figures = {d: _figures(job, variants[name].built, used.get(name, {})) for d, name in once.items()}
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


def _answers(variant: ProvenVariant) -> tuple[Path, str]:
    """Return the model and the plug-in of a variant, which determine the self-test's outputs. Several targets may share
    both.
    """
    plugin = variant.built.artifact.plugin
    return variant.built.artifact.model, plugin.name if plugin is not None else ""


def _figures(job: Job, built: Built, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Return the figures for the charts in the report that show one artifact's tensors and layers. The figures come
    from runs on onnxruntime's own kernels.
    """
    artifact = replace(built.artifact, engine=None)
    histograms = []
    if job.statistics is not None and ranges:
        among = quantized_tensors(shared_model(artifact.model, job.prepared.graph).model)
        histograms = worst_tensors(job.statistics, ranges, artifact.scheme, among=among)
    layers = layer_record(
        job.prepared.graph, artifact.proof_model, job.validation, artifact.proof_settings(), progress=job.progress
    )
    pictures: list[PicturePair] = []
    if judges_answers(job.head):
        with job.progress.stage("Drawing the answers that differ most"):
            sessions = open_session(job.prepared.path), open_session(artifact.proof_model, artifact.proof_settings())
            pictures = draw_pictures(job.head, job.validation, sessions)
    return {"histograms": histograms, "layers": layers, "pictures": pictures}


def _class_names(job: Job) -> Sequence[str]:
    """Return the names of the classes, from the head or else from the samples' labels. The head has those of the user
    or of the model, whose classes need not be the samples' folders.
    """
    names: Sequence[str] = job.head.labels if job.head is not None else ()
    return names or getattr(job.validation, "score_names", ())


def _licence(job: Job) -> dict[str, str]:
    """Return the model's licence, if its metadata contains one."""
    properties = {key.lower(): value.strip() for key, value in job.prepared.model.metadata_props.items()}
    licence = properties.get("license") or properties.get("licenses") or properties.get("licence")
    return {"license": licence} if licence else {}
