"""`edgeq package`: quantize for any number of targets and write one bundle, or one for each."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.backends.base import backend_named
from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.write import check_archive, share_weights, write_bundle
from edgeq.calibrate.ranges import Range, quantizable_tensors, scheme_ranges
from edgeq.calibrate.table import write_tables
from edgeq.data.open_source import Data
from edgeq.distributed.workers import open_workers
from edgeq.errors import EdgeqError, UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import refuse_ties
from edgeq.hardware.target import Target, as_targets, resolve, runs_natively
from edgeq.jobs.builds import Builds, check_measurable, must_decide, runtime_requirements, with_compiled
from edgeq.jobs.job import Built, Job, Request, collect_statistics
from edgeq.jobs.proof import Proof
from edgeq.jobs.saturation import Decision, decision_for
from edgeq.jobs.target_checks import (
    artifact_checks,
    check_built,
    check_engines,
    checks_of,
    exists_for,
    in_engine,
    refuse_left_out,
)
from edgeq.jobs.variants import (
    Variant,
    alternative_spec,
    selftest_cases,
    variant_name,
    variant_spec,
    with_fallback,
)
from edgeq.measure.coverage import strongest, summarise
from edgeq.measure.match_layers import match_activations
from edgeq.measure.task import Task
from edgeq.model.clean import BUNDLE as SUFFIX
from edgeq.model.clean import is_named_bundle
from edgeq.model.load import model_bytes, model_digest, path_of, shared_model
from edgeq.model.quant_params import QuantParams
from edgeq.report.layers import layer_record, quantized_tensors, worst_tensors
from edgeq.report.page import DEVICE_COMMANDS, TUNING, make_record, report_files
from edgeq.run.engines import EngineChoice, as_engines
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import computed, plain


def used_ranges(job: Job, built: Built) -> dict[str, Range]:
    """Return the range of each tensor in an artifact: what its file's scales and zero points represent, and the range
    that it was built from where the file has none (a table for TensorRT, a tensor in float)."""
    file = shared_model(built.artifact.proof_model, job.prepared.graph)
    found = dict(built.ranges)
    for match in match_activations(job.prepared.graph, file):
        params, before = match.params, found.get(match.name)
        if params is not None and not (before is not None and _is_scale_of(params, before)):
            found[match.name] = _represented(params)
    return found


def variant_ranges(job: Job, built: Mapping[str, Built]) -> dict[str, dict[str, Range]]:
    """Return `used_ranges` of each variant that has ranges, by the variant's name; one file is read once."""
    static = {name: one for name, one in built.items() if one.ranges}
    files = {one.artifact.proof_model: one for one in static.values()}
    found = {file: used_ranges(job, one) for file, one in files.items()}
    return {name: found[one.artifact.proof_model] for name, one in static.items()}


def write_variant_tables(
    job: Job, built: Mapping[str, Built], used: Mapping[str, Mapping[str, Range]], folder: Path
) -> dict[str, Path]:
    """Write the calibration tables of each variant that has ranges, those of equal ranges once.

    Args:
        built: by the variant's name; `used`: what `variant_ranges` gave.
        folder: made here.

    Returns:
        The folder of each variant's tables, by the variant's name.
    """
    if job.statistics is None:
        return {}
    folder.mkdir()
    tensors = quantizable_tensors(job.prepared.graph)
    written: list[tuple[dict[str, Range], Path]] = []
    places = {}
    for name, ranges in used.items():
        # A recovery that rewrites the model leaves tensors of the source without a range of their own.
        known = {**scheme_ranges(job.statistics, built[name].artifact.scheme), **ranges}
        kept = {tensor: known[tensor] for tensor in job.statistics.tensors}
        place = next((place for other, place in written if other == kept), None)
        if place is None:
            place = folder / str(len(written))
            write_tables(place, kept, tensors=tensors)
            written.append((kept, place))
        places[name] = place
    return places


def _is_scale_of(params: QuantParams, span: Range) -> bool:
    """Tell whether a scale is the one of a range, so that the range says the same without the zero point's rounding."""
    steps = params.high - params.low
    widths = float(params.scale.max()) * np.array([steps, steps - 1])  # a symmetric type leaves its least integer out
    return bool(np.isclose(widths, span.high - span.low, rtol=1e-5, atol=0.0).any())


def _represented(params: QuantParams) -> Range:
    """Return what the integers represent; signed ones around zero as the symmetric range that they are scaled for."""
    symmetric = params.low < 0 and not params.zero_point.any()
    low, high = (replace(params, narrow=True) if symmetric else params).range
    return Range(min(low, 0.0), max(high, 0.0))


def bundle_variants(
    job: Job,
    variants: Mapping[str, Variant],
    output: Path,
    *,
    workdir: Path,
    command: str,
    selftest: int = 2,
    with_float: bool = False,
    tuning: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    force: bool = False,
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
    extras = report_files(_report_record(job, variants, used, command, notes), tuning)
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
    """Return a file name as text that UTF-8 can hold."""
    return os.fsencode(name).decode("utf-8", "replace")


def _report_record(
    job: Job,
    variants: Mapping[str, Variant],
    used: Mapping[str, Mapping[str, Range]],
    command: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return what the bundle keeps for its report: nothing that another run on the same input would measure
    otherwise."""
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


def _answers(variant: Variant) -> tuple[Path, str]:
    """Return what decides the self-test's outputs: the model, which several targets may share, and the plug-in."""
    plugin = variant.built.artifact.plugin
    return variant.built.artifact.model, plugin.name if plugin is not None else ""


def _figures(job: Job, built: Built, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """Return what the report draws of one artifact's tensors and layers, which onnxruntime's own kernels run."""
    artifact = replace(built.artifact, engine=None)
    histograms = []
    if job.statistics is not None and ranges:
        among = quantized_tensors(shared_model(artifact.model, job.prepared.graph).model)
        histograms = worst_tensors(job.statistics, ranges, artifact.scheme, among=among)
    layers = layer_record(
        job.prepared.graph, artifact.proof_model, job.validation, artifact.proof_settings(), progress=job.progress
    )
    return {"histograms": histograms, "layers": layers}


def _licence(job: Job) -> dict[str, str]:
    """Return the model's licence, where its metadata has one."""
    held = {key.lower(): value.strip() for key, value in job.prepared.model.metadata_props.items()}
    licence = held.get("license") or held.get("licenses") or held.get("licence")
    return {"license": licence} if licence else {}


def target_variants(
    builds: Builds,
    target: Target,
    scheme: Scheme,
    *,
    overrides: Mapping[str, Any],
    plugins: Sequence[EngineChoice],
    selftest: int,
    emulate: bool,
    bars: Callable[[Proof], None],
) -> dict[str, Variant]:
    """Return the variants of one target by name: what runs in onnxruntime's own kernels, then what plug-ins run in its
    place where they are, the best first.

    Args:
        overrides: fields of the scheme that the user has set.
        plugins: the target gets one more variant for each of these engines that exists for it.
        selftest: how many samples travel as self-test vectors.
        emulate: whether what is for other machines is checked on their kernels.
        bars: refuses the proof of the first variant.

    Raises:
        CheckFailedError: a bar is not met, or it fails on the target's kernels.
    """
    decision = decision_for(builds, target, scheme) if must_decide(target, scheme, overrides) else None
    first = _variant(builds, target, scheme, decision, selftest)
    bars(first.proof)
    preferred = []
    for choice in plugins:
        if exists_for(choice.engine, target):
            variant, decision = first, None
            if must_decide(target, scheme, overrides, choice.engine):
                decision = decision_for(builds, target, scheme, choice.engine)
                variant = _variant(builds, target, scheme, decision, selftest)
            preferred.append(in_engine(builds, variant, choice, decision))
    if emulate and not first.native:
        first, *preferred = (_emulated(builds.job, variant, selftest) for variant in (first, *preferred))
    return with_fallback(variant_name(target), first, preferred)


def _variant(builds: Builds, target: Target, scheme: Scheme, decision: Decision | None, selftest: int) -> Variant:
    job, scheme = builds.job, decision.chosen.scheme if decision is not None else scheme
    built = builds.build(target, scheme)
    folder, backend = job.folder / f"companions-{variant_name(target)}", backend_named(target.backend)
    artifact = backend.with_companions(built.artifact, job.validation, folder, count=selftest)
    built = with_compiled(job, replace(built, artifact=artifact))
    needed, runtime = runtime_requirements(job, target, built.artifact)
    refuse_left_out(target, built.artifact)
    native = runs_natively(target, job.machine)
    proof = builds.prove(built, scheme, native=native)
    return Variant(
        built,
        proof,
        native,
        model_bytes(built.artifact.model),
        scheme=scheme,
        checks=(*artifact_checks(built, proof, job.machine, decision), runtime),
        decision=decision,
        compatibility=needed,
    )


def _emulated(job: Job, variant: Variant, selftest: int) -> Variant:
    """Return `variant` with the result of the check on the target's own kernels."""
    found = check_built(job, variant.built, variant.proof.coverage, selftest=selftest)
    return replace(variant, emulated=found, checks=strongest((*variant.checks, *checks_of(found))))


@dataclass(frozen=True)
class Packaged(Page):
    """What `package` did: the bundles, the variants by name in the order of a bundle, and how many models they share.

    `bundle` is where all variants are, or the folder of one bundle for each.
    """

    bundle: Path
    bundles: Mapping[str, Path]
    variants: Mapping[str, Variant]
    notes: tuple[str, ...]

    @computed
    def models(self) -> int:
        """Count the different models among the variants."""
        return len({variant.built.artifact.model for variant in self.variants.values()})

    def __page__(self) -> dict[str, Any]:
        variants = {
            name: {**plain(variant), "title": variant.built.target.title} for name, variant in self.variants.items()
        }
        return {"name": self.bundle.name, "variants": variants, "notes": list(self.notes)}


def package(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path,
    *,
    targets: str | Path | Sequence[str | Path] = ("this-machine",),
    validation: Data | Any | None = None,
    statistics: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    fix: Mapping[str, int] | None = None,
    task: Task | str | None = None,
    max_drop: float | None = None,
    require_coverage: float | None = None,
    with_float: bool = False,
    selftest: int = 2,
    split: bool = False,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
    timed: bool = True,
    emulate: bool = True,
    force: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> Packaged:
    """Calibrate `model` once, build and prove what each target needs, once for those that need the same, and write it.

    Args:
        output: a directory, or a file that ends in ".edgeq".
        targets: names of targets or profiles, or paths to TOML files, one or several; the order does not matter.
        with_float: put the float32 model in too, so that the device can time both.
        selftest: how many samples travel as self-test vectors.
        split: write one bundle for each target, `output`/NAME.edgeq, instead of one for all.
        engines: plug-ins that each target gets one more variant for, the best first: the same model, proven in the
            engine. Names such as "openvino:bf16", one or several. A device without the plug-in, or where it is not
            right, runs the variant that needs none.
        emulate: whether variants for other machines are checked on their own kernels where they can be run here.
        Others as `quantize`.

    Raises:
        CheckFailedError: a bar is not met by some variant, or its target's onnxruntime cannot load it, or it
            fails on its target's kernels; nothing is written then but, with `split`, the bundles of the others.
        RuntimeUnavailableError: an engine is not installed here.
        UsageError: an argument of another type, or an unknown task or engine.
        EdgeqError: as the stages have it.
    """
    request, output = Request.of(model, data, validation, statistics, task), path_of(output, "output")
    engines, targets = as_engines(engines) if engines else (), as_targets(targets)
    if split and is_named_bundle(output):
        raise UsageError(f"{output} is one bundle", f"Name a folder: --split writes NAME{SUFFIX} into it")
    machine = detect_machine()
    resolved = {str(target): resolve(target, machine) for target in targets}
    chosen = _in_package_order([resolved[str(target)] for target in targets])
    plugins = check_engines(engines, chosen)
    asked = {variant_name(target): name for name, target in resolved.items()}
    places = _places(output, list(asked), split=split)
    for place in places:
        request.check_output(place, force=force)
        if split:  # the user did not name these files
            check_archive(place)
    schemes = request.schemes(chosen, overrides, max_drop=max_drop)
    if require_coverage is not None:
        check_measurable(chosen, machine, emulate=emulate)
    with (
        tempfile.TemporaryDirectory(prefix="edgeq-") as folder,
        open_workers(workers) if workers is not None else nullcontext() as pool,
    ):
        job = request.prepare(
            Path(folder),
            static=any(scheme.mode == "static" for scheme in schemes),
            exclude=sorted({name for scheme in schemes for name in scheme.exclude}),
            adopting=all(backend_named(target.backend).adopts_quantized for target in chosen),
            fix=fix,
            workers=pool,
            machine=machine,
            progress=progress,
        )
        job = collect_statistics(job, request.statistics)
        if selftest > len(job.validation):
            progress.note(f"the self-test has {len(job.validation)} samples, not {selftest}: there are no more")
        builds = Builds(job, job.folder, timed=timed, emulate=emulate)
        done: dict[str, Variant] = {}
        failed: dict[str, EdgeqError] = {}
        for target, scheme in zip(chosen, schemes, strict=True):
            try:
                done |= target_variants(
                    builds,
                    target,
                    scheme,
                    overrides=overrides or {},
                    plugins=plugins,
                    selftest=selftest,
                    emulate=emulate,
                    bars=lambda proof: proof.check(max_drop=max_drop, require_coverage=require_coverage),
                )
            except EdgeqError as error:
                if not split or len(chosen) == 1:
                    raise
                failed[variant_name(target)] = error  # the others are bundles of their own
        places = {place: names for place, names in places.items() if not failed.keys() & set(names)}
        artifacts = (note for v in done.values() for note in (*v.built.artifact.notes, *v.proof.opening.notes))
        notes = tuple(dict.fromkeys([*job.prepared.notes, *artifacts]))
        for place, names in places.items():
            named = [f"-t {shlex.quote(asked[name])}" for name in sorted(names, key=asked.__getitem__)]
            named += [f"--engine {choice.name}" for choice in plugins]
            model_name = shlex.quote(as_text(request.model.name))
            own = job.folder / f"bundle-{place.name}"
            own.mkdir()
            if split:
                output.mkdir(parents=True, exist_ok=True)
                check_archive(place)
            bundle_variants(
                job,
                {name: variant for name, variant in done.items() if variant_name(variant.built.target) in names},
                place,
                workdir=own,
                command=f"edgeq package {model_name} --data CALIBRATION {' '.join(named)} -o BUNDLE",
                selftest=selftest,
                with_float=with_float,
                notes=notes,
                force=force,
            )
    if failed:
        raise _all_in_one(failed, written=list(places))
    written = {name: place for place, names in places.items() for name in names}
    bundles = {name: written[variant_name(variant.built.target)] for name, variant in done.items()}
    return Packaged(output, bundles, done, notes)


def _places(output: Path, names: Sequence[str], *, split: bool) -> dict[Path, tuple[str, ...]]:
    """Bundle → the names of its variants."""
    if not split:
        return {output: tuple(names)}
    return {output / f"{name}{SUFFIX}": (name,) for name in names}


def _all_in_one(failed: Mapping[str, EdgeqError], *, written: Sequence[Path]) -> EdgeqError:
    """Return one error for the targets that failed, of the kind of the first; it says which bundles are there all the
    same."""
    first = next(iter(failed.values()))
    problems = "; ".join(
        error.problem if error.problem.startswith(name) else f"{name}: {error.problem}"
        for name, error in failed.items()
    )
    done = f"written: {', '.join(map(str, written))}" if written else "no bundle is written"
    return type(first)(f"{problems}; {done}", first.fix)


def _in_package_order(targets: Sequence[Target]) -> list[Target]:
    """Least demanding first: ONNX Runtime itself takes the first variant that fits, edgeq's runner the best."""
    names = [variant_name(target) for target in targets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UsageError(f"target {repeated} is named twice", "Name each target once, and give two files two names")
    # A profile named by its path was not among those whose ranks were compared on loading.
    refuse_ties(list({target.profile.name: target.profile for target in targets}.values()))
    return sorted(targets, key=lambda target: (target.architecture, target.profile.rank, target.name))
