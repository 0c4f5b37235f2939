"""Implement `edgeq package`: quantize for any number of targets, and write one bundle for all targets or one
for each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import backend_for, backend_named
from edgeq.bundle.write import check_archive
from edgeq.data.open_source import Data
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import CheckFailedError, EdgeqError, UsageError, unwritten
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import refuse_ties
from edgeq.hardware.target import Target, resolve, runs_natively
from edgeq.jobs.bundles import BundleContents, as_text, bundle_variants
from edgeq.jobs.repair import Repairer
from edgeq.measure.checks import keep_strongest
from edgeq.measure.find_head import HeadChoice
from edgeq.measure.task import Task
from edgeq.model.files import model_bytes
from edgeq.prove.builds import (
    Builds,
    check_measurable,
    must_decide,
    runtime_requirements,
    simulated_proof,
    with_compiled,
)
from edgeq.prove.engine_choices import check_engines, exists_for, is_other_precision
from edgeq.prove.job import Job
from edgeq.prove.kernel_check import check_built, checks_of, prove_precision
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.request import Effort, Request
from edgeq.prove.saturation import Decision, decision_for
from edgeq.prove.target_checks import artifact_checks, prove_in_engine, refuse_left_out
from edgeq.prove.variants import ProvenVariant, variant_name, with_fallback
from edgeq.run.engines import Engine, EngineChoice, as_engines
from edgeq.scheme import Scheme
from edgeq.util.bundle_names import BUNDLE as SUFFIX
from edgeq.util.bundle_names import is_named_bundle
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.outputs import default_output
from edgeq.util.paths import path_of
from edgeq.util.records import computed, marked


def target_variants(
    builds: Builds,
    target: Target,
    scheme: Scheme,
    request: Request,
    repairer: Repairer,
    *,
    plugins: Sequence[EngineChoice],
    selftest: int,
) -> dict[str, ProvenVariant]:
    """Return the variants of one target by name. The variant for onnxruntime's own kernels is first. The variants for
    plug-ins follow, best first. If a plug-in is installed, its variant runs instead of the first variant.

    Args:
        request: the request, whose limits the first variant must keep.
        repairer: object that repairs results that fall short.
        plugins: plug-in engines. The target gets one more variant for each engine that supports the target.
        selftest: number of samples to include as self-test vectors.

    Raises:
        CheckFailedError: a limit is missed, or a variant fails on the target's kernels.
    """

    def decide(engine: Engine | None = None) -> Decision | None:
        undecided = must_decide(target, scheme, request.overrides, engine)
        return decision_for(builds, target, scheme, engine) if undecided else None

    decision = decide()
    default = _variant(builds, target, scheme, decision, selftest, repairer)
    default.proof.check(max_drop=request.max_drop, require_coverage=request.require_coverage)
    preferred, precisions = [], [choice for choice in plugins if is_other_precision(choice, target)]
    for choice in plugins:
        if choice not in precisions and exists_for(choice.engine, target):
            # A plug-in whose kernels saturate too needs an artifact of its own.
            decision = decide(choice.engine)
            variant = default if decision is None else _variant(builds, target, scheme, decision, selftest, repairer)
            preferred.append(prove_in_engine(builds, variant, choice, decision))
    if request.emulate and not default.native:
        default, *preferred = (_emulated(builds.job, variant, selftest) for variant in (default, *preferred))
    preferred += [prove_precision(builds.job, default, choice, selftest) for choice in precisions]
    return with_fallback(variant_name(target), default, preferred)


def _variant(
    builds: Builds, target: Target, scheme: Scheme, decision: Decision | None, selftest: int, repairer: Repairer
) -> ProvenVariant:
    job, scheme = builds.job, decision.chosen.scheme if decision is not None else scheme
    native, built = runs_natively(target, job.machine), builds.build(target, scheme)
    built, proof = repairer.prove(built, scheme, native=native)
    folder, backend = job.folder / f"companions-{variant_name(target)}", backend_for(target)
    described = replace(built.artifact, head=job.head, title=as_text(job.source.stem))
    artifact = backend.with_companions(described, job.validation, folder, count=selftest)
    built = with_compiled(job, replace(built, artifact=artifact))
    proof = simulated_proof(job, built, replace(proof, coverage=built.artifact.coverage or proof.coverage))
    requirements, runtime = runtime_requirements(job, target, built.artifact)
    refuse_left_out(target, built.artifact)
    return ProvenVariant(
        built,
        proof,
        native,
        model_bytes(built.artifact.model),
        scheme=scheme,
        checks=(*artifact_checks(built, proof, job.machine, decision), runtime),
        decision=decision,
        compatibility=requirements,
    )


def _emulated(job: Job, variant: ProvenVariant, selftest: int) -> ProvenVariant:
    """Return `variant` with the result of its check on the target's own kernels."""
    check = check_built(job, variant.built, variant.proof.coverage, selftest=selftest)
    return replace(variant, emulated=check, checks=keep_strongest((*variant.checks, *checks_of(check))))


@dataclass(frozen=True)
class Packaged(Page):
    """Report the result of `package`.

    Attributes:
        bundle: the bundle with all variants, or the folder with one bundle for each target.
        bundles: variant's name → path of its bundle.
        variants: the variants by name, in the order in which a bundle lists them.
    """

    bundle: Path
    bundles: Mapping[str, Path]
    variants: Mapping[str, ProvenVariant]
    notes: tuple[str, ...]

    @computed
    def models(self) -> int:
        """Count the different models among the variants."""
        return len({variant.built.artifact.model for variant in self.variants.values()})

    def __page__(self) -> dict[str, Any]:
        variants = {
            name: {**marked(variant), "title": variant.built.target.title} for name, variant in self.variants.items()
        }
        return {"name": self.bundle.name, "variants": variants, "notes": list(self.notes)}


def package(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path | None = None,
    *,
    targets: str | Path | Sequence[str | Path] = ("this-machine",),
    val: Data | Any | None = None,
    statistics: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    fix: Mapping[str, int] | None = None,
    task: Task | str | None = None,
    head: HeadChoice | str | None = None,
    threshold: float | str | None = None,
    cut_head: bool = False,
    max_drop: float | str | None = None,
    effort: Effort | None = "default",
    require_coverage: float | str | None = None,
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
    """Calibrate `model` once, build and prove the model for each target, and write the bundle. Targets that need the
    same model share one build.

    Args:
        output: a folder, or a file that ends in ".edgeq". Default: MODEL.edgeq next to the model.
        targets: one or several names of targets or profiles, or paths to TOML files; the order does not matter.
        with_float: include the float32 model, so that the device can time both models.
        selftest: number of samples to include as self-test vectors.
        split: write one bundle for each target, `output`/NAME.edgeq, instead of one for all.
        engines: one or several names of plug-ins, such as "openvino:bf16", best first. For each plug-in, each target
            gets one more variant, which is the same model proven in that engine. If a device does not have the plug-in
            or its plug-in gives wrong results, it runs the variant that needs no plug-in.
        emulate: whether variants for other machines are checked on the kernels of those machines, if this machine can
            run them.
        Other arguments: see `quantize`.

    Raises:
        CheckFailedError: a variant misses a limit, its target's onnxruntime cannot load it, or it fails on its target's
            kernels. Then no bundle is written. By contrast, with `split`, the bundles of the other targets are still
            written.
        RuntimeUnavailableError: an engine is not installed here.
        UsageError: an argument has the wrong type, or a task or engine is unknown.
        EdgeqError: a stage failed.
    """
    request = Request.of(
        model,
        data,
        val=val,
        statistics=statistics,
        task=task,
        head=head,
        threshold=threshold,
        cut_head=cut_head,
        fix=fix,
        targets=targets,
        overrides=overrides,
        max_drop=max_drop,
        effort=effort,
        require_coverage=require_coverage,
        timed=timed,
        emulate=emulate,
        force=force,
        workers=workers,
        progress=progress,
    )
    return run_package(request, output, contents=BundleContents(selftest, with_float), split=split, engines=engines)


def run_package(
    request: Request,
    output: str | Path | None = None,
    *,
    contents: BundleContents | None = None,
    split: bool = False,
    engines: EngineChoice | str | Sequence[EngineChoice | str] = (),
) -> Packaged:
    """Make the variants for all targets of a request, and write them as bundles.

    1. Plan: order the targets, choose their schemes, and refuse what cannot succeed.
    2. Prepare the model, and open its samples.
    3. Calibrate: one float32 pass gives the ranges of all schemes.
    4. For each target: choose a mitigation, build, prove, repair, and check on the target's kernels.
    5. Write the bundles.

    Args and errors: see `package`.
    """
    contents = contents or BundleContents()
    # 1. Everything that can be refused is refused here, because the next steps take minutes.
    plan = _plan(request, output, engines, split=split)
    with scratch_folder("edgeq-") as folder, open_workers(request.workers) as workers:
        # 2. The names of excluded nodes are looked up here, before the calibration.
        job = _prepare(plan, Path(folder), workers)
        # 3. Statistics that `calibrate` wrote replace the pass.
        job = collect_statistics(job, request.statistics)
        if contents.selftest > len(job.validation):
            available, requested = len(job.validation), contents.selftest
            request.progress.note(f"the self-test has {available} samples, not {requested}: there are no more")
        # 4. A target that fails leaves the bundles of the others untouched.
        variants, failures = _build_variants(plan, job, contents.selftest)
        # 5. Nothing is written before all variants are built, so a bundle is never incomplete.
        bundles = {place: names for place, names in plan.bundles.items() if not failures.keys() & set(names)}
        notes = _notes(job, variants)
        for place, names in bundles.items():
            contained = {name: v for name, v in variants.items() if variant_name(v.built.target) in names}
            _write(plan, job, place, contained, contents, notes)
    if failures:
        raise _all_in_one(failures, bundles=list(bundles))
    places = {name: place for place, names in bundles.items() for name in names}
    place_by_variant = {name: places[variant_name(variant.built.target)] for name, variant in variants.items()}
    return Packaged(plan.output, place_by_variant, variants, notes)


@dataclass(frozen=True)
class _PackagePlan:
    """Hold what is decided before any work.

    Attributes:
        targets, schemes: the targets in the order of a bundle, and their schemes.
        typed: variant's name → target as the user gave it.
        plugins: the plug-in engines for which each target gets one more variant.
        bundles: path of a bundle → names of its variants.
        split: whether each target has a bundle of its own.
    """

    request: Request
    machine: Machine
    targets: Sequence[Target]
    schemes: Sequence[Scheme]
    typed: Mapping[str, str]
    plugins: Sequence[EngineChoice]
    output: Path
    bundles: Mapping[Path, tuple[str, ...]]
    split: bool


def _plan(
    request: Request,
    output: str | Path | None,
    engines: EngineChoice | str | Sequence[EngineChoice | str],
    *,
    split: bool,
) -> _PackagePlan:
    """Return the plan for a request.

    Raises:
        UsageError: an argument has the wrong type, or arguments exclude each other.
        OutputError: an output is refused.
        RuntimeUnavailableError: the required coverage cannot be measured here.
    """
    place = path_of(default_output(request.model, SUFFIX) if output is None else output, "output")
    choices = as_engines(engines) if engines else ()
    if split and is_named_bundle(place):
        raise UsageError(f"{place} is one bundle", f"Name a folder: ⟨split⟩ writes NAME{SUFFIX} into it")
    machine = detect_machine()
    resolved = {str(target): resolve(target, machine) for target in request.targets}
    targets = _in_package_order([resolved[str(target)] for target in request.targets])
    plugins = check_engines(choices, targets)
    typed = {variant_name(target): name for name, target in resolved.items()}
    bundles = _places(place, list(typed), split=split)
    for bundle in bundles:
        request.check_output(bundle)
        if split:  # these files were not named by the user
            check_archive(bundle)
    schemes = request.schemes(targets)
    if request.require_coverage is not None:
        check_measurable(targets, machine, emulate=request.emulate)
    return _PackagePlan(request, machine, targets, schemes, typed, plugins, place, bundles, split)


def _prepare(plan: _PackagePlan, folder: Path, workers: Workers | None) -> Job:
    return prepare(
        plan.request,
        folder,
        static=any(scheme.mode == "static" for scheme in plan.schemes),
        exclude=sorted({name for scheme in plan.schemes for name in scheme.exclude}),
        adopting=all(backend_named(target.backend).adopts_quantized for target in plan.targets),
        workers=workers,
        machine=plan.machine,
    )


def _build_variants(
    plan: _PackagePlan, job: Job, selftest: int
) -> tuple[dict[str, ProvenVariant], dict[str, EdgeqError]]:
    """Return the variants of all targets by name. If each target has its own bundle, also return the errors of targets
    that failed.

    Raises:
        EdgeqError: a target failed, and its variant belongs into a bundle with others.
    """
    request = plan.request
    builds = Builds(job, job.folder, timed=request.timed, emulate=request.emulate)
    repairer = Repairer(builds, request.effort, request.max_drop, frozenset(request.overrides))
    variants: dict[str, ProvenVariant] = {}
    failures: dict[str, EdgeqError] = {}
    for target, scheme in zip(plan.targets, plan.schemes, strict=True):
        name = variant_name(target)
        try:
            of_target = target_variants(
                builds, target, scheme, request, repairer, plugins=plan.plugins, selftest=selftest
            )
            if repeated := sorted(variants.keys() & of_target.keys()):
                raise UsageError(f"two variants would be called {repeated[0]}", "Leave ⟨engine⟩ or a target out")
            variants |= of_target
        except EdgeqError as error:
            if not plan.split or len(plan.targets) == 1:
                if not isinstance(error, CheckFailedError):
                    raise
                place = next(place for place, names in plan.bundles.items() if name in names)
                raise unwritten(error, f"{place}, with the variant for {target.name},") from error
            failures[name] = error
    return variants, failures


def _notes(job: Job, variants: Mapping[str, ProvenVariant]) -> tuple[str, ...]:
    """Return the notes about the model and all variants, each once."""
    notes = [note for v in variants.values() for note in (*v.built.artifact.notes, *v.proof.opening.notes)]
    return tuple(dict.fromkeys([*job.prepared.notes, *notes]))


def _write(
    plan: _PackagePlan,
    job: Job,
    place: Path,
    variants: Mapping[str, ProvenVariant],
    contents: BundleContents,
    notes: Sequence[str],
) -> None:
    """Write one bundle. Its record names the command that would make it again."""
    names = {variant_name(variant.built.target) for variant in variants.values()}
    words = [f"-t {shlex.quote(plan.typed[name])}" for name in sorted(names, key=plan.typed.__getitem__)]
    words += [f"⟨engine⟩ {choice.name}" for choice in plan.plugins]
    model_name = shlex.quote(as_text(plan.request.model.name))
    folder = job.folder / f"bundle-{place.name}"
    folder.mkdir()
    if plan.split:
        plan.output.mkdir(parents=True, exist_ok=True)
        check_archive(place)  # again, because the builds before took minutes
    bundle_variants(
        job,
        variants,
        place,
        workdir=folder,
        command=f"edgeq package {model_name} ⟨data⟩ CALIBRATION {' '.join(words)} -o BUNDLE",
        contents=contents,
        notes=notes,
        force=plan.request.force,
    )


def _places(output: Path, names: Sequence[str], *, split: bool) -> dict[Path, tuple[str, ...]]:
    """Return path of a bundle → names of its variants."""
    if not split:
        return {output: tuple(names)}
    return {output / f"{name}{SUFFIX}": (name,) for name in names}


def _all_in_one(failed: Mapping[str, EdgeqError], *, bundles: Sequence[Path]) -> EdgeqError:
    """Return one error for all the targets that failed. It has the type of the first error, and names the bundles that
    were written nevertheless.
    """
    error = next(iter(failed.values()))
    problems = "; ".join(
        error.problem if error.problem.startswith(name) else f"{name}: {error.problem}"
        for name, error in failed.items()
    )
    outcome = f"written: {', '.join(map(str, bundles))}" if bundles else "no bundle is written"
    return type(error)(f"{problems}; {outcome}", error.fix)


def _in_package_order(targets: Sequence[Target]) -> list[Target]:
    """Return the targets, least demanding first. ONNX Runtime itself runs the first variant that fits the machine. By
    contrast, edgeq's runner runs the best variant that fits.
    """
    names = [variant_name(target) for target in targets]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise UsageError(f"target {repeated} is named twice", "Name each target once, and give two files two names")
    # The ranks of shipped profiles are compared with each other when they are loaded. A profile that is named by its
    # path is compared only here.
    refuse_ties(list({target.profile.name: target.profile for target in targets}.values()))
    return sorted(targets, key=lambda target: (target.architecture, target.profile.rank, target.name))
