"""Implement `edgeq package`: quantize for any number of targets, and write one bundle for all targets or one
for each.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import backend_for, backend_named
from edgeq.bundle.write import check_archive
from edgeq.data.open_source import Data
from edgeq.distributed.workers import open_workers
from edgeq.errors import CheckFailedError, EdgeqError, UsageError, unwritten
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import refuse_ties
from edgeq.hardware.target import Target, as_targets, resolve, runs_natively
from edgeq.jobs.bundles import as_text, bundle_variants
from edgeq.jobs.repair import Repairer
from edgeq.measure.coverage import strongest
from edgeq.measure.task import Task
from edgeq.model.clean import BUNDLE as SUFFIX
from edgeq.model.clean import is_named_bundle
from edgeq.model.load import model_bytes, path_of
from edgeq.prove.builds import (
    Builds,
    check_measurable,
    must_decide,
    runtime_requirements,
    simulated_proof,
    with_compiled,
)
from edgeq.prove.job import Job, Request, collect_statistics
from edgeq.prove.proof import Proof
from edgeq.prove.saturation import Decision, decision_for
from edgeq.prove.target_checks import (
    artifact_checks,
    check_built,
    check_engines,
    checks_of,
    exists_for,
    in_engine,
    refuse_left_out,
)
from edgeq.prove.variants import ProvenVariant, variant_name, with_fallback
from edgeq.run.engines import EngineChoice, as_engines
from edgeq.scheme import Scheme
from edgeq.tuning.goal import Effort, check_effort
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.numbers import parse_drop, parse_share
from edgeq.util.outputs import next_to
from edgeq.util.records import computed, marked


def target_variants(
    builds: Builds,
    target: Target,
    scheme: Scheme,
    *,
    overrides: Mapping[str, Any],
    plugins: Sequence[EngineChoice],
    selftest: int,
    emulate: bool,
    repairer: Repairer,
    bars: Callable[[Proof], None],
) -> dict[str, ProvenVariant]:
    """Return the variants of one target by name. The variant for onnxruntime's own kernels is first. The variants for
    plug-ins follow, best first. If a plug-in is installed, its variant runs instead of the first variant.

    Args:
        overrides: fields of the scheme that the user has set.
        plugins: plug-in engines. The target gets one more variant for each engine that supports the target.
        selftest: number of samples to include as self-test vectors.
        emulate: whether variants for other machines are checked on the kernels of those machines.
        repairer: object that repairs results that fall short.
        bars: function that raises an error if the proof of the first variant misses a limit.

    Raises:
        CheckFailedError: a limit is missed, or a variant fails on the target's kernels.
    """
    decision = decision_for(builds, target, scheme) if must_decide(target, scheme, overrides) else None
    first = _variant(builds, target, scheme, decision, selftest, repairer)
    bars(first.proof)
    preferred = []
    for choice in plugins:
        if exists_for(choice.engine, target):
            variant, decision = first, None
            if must_decide(target, scheme, overrides, choice.engine):
                decision = decision_for(builds, target, scheme, choice.engine)
                variant = _variant(builds, target, scheme, decision, selftest, repairer)
            preferred.append(in_engine(builds, variant, choice, decision))
    if emulate and not first.native:
        first, *preferred = (_emulated(builds.job, variant, selftest) for variant in (first, *preferred))
    return with_fallback(variant_name(target), first, preferred)


def _variant(
    builds: Builds, target: Target, scheme: Scheme, decision: Decision | None, selftest: int, repairer: Repairer
) -> ProvenVariant:
    job, scheme = builds.job, decision.chosen.scheme if decision is not None else scheme
    native, built = runs_natively(target, job.machine), builds.build(target, scheme)
    built, proof = repairer.proven(built, scheme, native=native)
    folder, backend = job.folder / f"companions-{variant_name(target)}", backend_for(target)
    artifact = backend.with_companions(built.artifact, job.validation, folder, count=selftest)
    built = with_compiled(job, replace(built, artifact=artifact))
    proof = simulated_proof(job, built, replace(proof, coverage=built.artifact.coverage or proof.coverage))
    needed, runtime = runtime_requirements(job, target, built.artifact)
    refuse_left_out(target, built.artifact)
    return ProvenVariant(
        built,
        proof,
        native,
        model_bytes(built.artifact.model),
        scheme=scheme,
        checks=(*artifact_checks(built, proof, job.machine, decision), runtime),
        decision=decision,
        compatibility=needed,
    )


def _emulated(job: Job, variant: ProvenVariant, selftest: int) -> ProvenVariant:
    """Return `variant` with the result of its check on the target's own kernels."""
    found = check_built(job, variant.built, variant.proof.coverage, selftest=selftest)
    return replace(variant, emulated=found, checks=strongest((*variant.checks, *checks_of(found))))


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
    request = Request.of(model, data, val, statistics, task)
    output = path_of(next_to(request.model, SUFFIX) if output is None else output, "output")
    max_drop, require_coverage = (
        parse_drop(max_drop),
        parse_share("--require-coverage", require_coverage),
    )
    engines, targets = as_engines(engines) if engines else (), as_targets(targets)
    check_effort(effort)
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
        if split:  # these files were not named by the user
            check_archive(place)
    schemes = request.schemes(chosen, overrides, max_drop=max_drop)
    if require_coverage is not None:
        check_measurable(chosen, machine, emulate=emulate)
    with (
        scratch_folder("edgeq-") as folder,
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
        repairer = Repairer(builds, effort, max_drop, frozenset(overrides or ()))
        done: dict[str, ProvenVariant] = {}
        failed: dict[str, EdgeqError] = {}
        for target, scheme in zip(chosen, schemes, strict=True):
            try:
                made = target_variants(
                    builds,
                    target,
                    scheme,
                    overrides=overrides or {},
                    plugins=plugins,
                    selftest=selftest,
                    emulate=emulate,
                    repairer=repairer,
                    bars=lambda proof: proof.check(max_drop=max_drop, require_coverage=require_coverage),
                )
                if repeated := sorted(done.keys() & made.keys()):
                    raise UsageError(f"two variants would be called {repeated[0]}", "Leave --engine or a target out")
                done |= made
            except EdgeqError as error:
                if not split or len(chosen) == 1:
                    if not isinstance(error, CheckFailedError):
                        raise
                    place = next(place for place, names in places.items() if variant_name(target) in names)
                    raise unwritten(error, f"{place}, with the variant for {target.name},") from error
                failed[variant_name(target)] = error  # the other targets have their own bundles
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
    """Return path of a bundle → names of its variants."""
    if not split:
        return {output: tuple(names)}
    return {output / f"{name}{SUFFIX}": (name,) for name in names}


def _all_in_one(failed: Mapping[str, EdgeqError], *, written: Sequence[Path]) -> EdgeqError:
    """Return one error for all the targets that failed. It has the type of the first error, and names the bundles that
    were written nevertheless.
    """
    first = next(iter(failed.values()))
    problems = "; ".join(
        error.problem if error.problem.startswith(name) else f"{name}: {error.problem}"
        for name, error in failed.items()
    )
    done = f"written: {', '.join(map(str, written))}" if written else "no bundle is written"
    return type(first)(f"{problems}; {done}", first.fix)


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
