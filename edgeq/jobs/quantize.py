"""Implement `edgeq quantize`, which makes one proven artifact from one model for one target."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import ESTIMATE, ONNX, REGISTRY, backend_for, check_suffix, file_suffix
from edgeq.data.open_source import Data
from edgeq.distributed.workers import Workers, open_workers
from edgeq.errors import CheckFailedError, UsageError, unwritten
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, resolve, runs_natively
from edgeq.jobs.faster_form import ProvenForm, compare_forms, hand_over, keep_plain
from edgeq.jobs.repair import Repairer
from edgeq.measure.find_head import HeadChoice
from edgeq.measure.task import Task
from edgeq.model.files import data_names, model_bytes
from edgeq.prove.block_race import must_race, race_compute
from edgeq.prove.builds import Builds, check_measurable, finished, must_decide, runtime_requirements, simulated_proof
from edgeq.prove.job import Builder, Built, Job
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.proof import Proof
from edgeq.prove.request import Effort, Request
from edgeq.prove.saturation import Decision, decision_for
from edgeq.quantization.block_compute import DETAIL, BlockCompute
from edgeq.run.engines import EngineChoice, as_engine
from edgeq.run.session import EngineFiles
from edgeq.scheme import Scheme
from edgeq.tuning.goal import allowed_drop
from edgeq.util.bundle_names import check_model_name
from edgeq.util.display import SILENT, Page, Progress, Stopwatch
from edgeq.util.outputs import default_output, output_file
from edgeq.util.paths import path_of
from edgeq.util.records import marked


@dataclass(frozen=True)
class Quantized(Page):
    """Report the result of `quantize`.

    Attributes:
        output: the quantized model.
        scheme: the scheme of the build, after overrides.
        session_options: options to set when the model is run. Without them, its outputs change.
        bytes_float, bytes_int8: size on disk of the source and the output, with external data.
        native: whether this machine runs the target's kernels itself. If not, the proof is for this machine's kernels.
        decision: the decision about kernels that can saturate, or None if the target has no such kernels.
        seconds: the time of each stage, by its title.
        block_compute: the type in which matrix products with block-quantized weights are computed, or None if there are
            no such products.
        estimate: a record of the memory and speed that the hardware's own tools estimate, or None if the hardware has
            no such tools.
    """

    output: Path
    target: Target
    scheme: Scheme
    session_options: Mapping[str, str]
    proof: Proof
    bytes_float: int
    bytes_int8: int
    native: bool
    notes: tuple[str, ...]
    decision: Decision | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    block_compute: BlockCompute | None = None
    estimate: Any = None

    def __brief__(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "target": self.target.name,
            "scheme": self.scheme.title,
            "bytes": self.bytes_int8,
            "of_float32": self.bytes_int8 / self.bytes_float,
            **self.proof.__brief__(),
        }

    def __page__(self) -> dict[str, Any]:
        variant = {**marked(self), "title": self.target.title, "bytes": self.bytes_int8}
        notes = {"model": {"bytes": self.bytes_float}, "notes": list(self.notes)}
        return {"name": self.output.name, "variants": {self.target.name: variant}, **notes}

    def __record__(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "target": self.target.name,
            "profile": self.target.profile.name,
            "scheme": self.scheme,
            "session_options": self.session_options,
            "bytes": {"float32": self.bytes_float, "int8": self.bytes_int8},
            "native": self.native,
            "notes": self.notes,
            "saturation": self.decision,
            "block_compute": self.block_compute,
            "seconds": self.seconds,
            **({ESTIMATE: self.estimate} if self.estimate is not None else {}),
            **marked(self.proof),
        }


def quantize(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path | None = None,
    *,
    target: str | Path = "auto",
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
    builder: Builder | None = None,
    engine: EngineChoice | str | None = None,
    timed: bool = True,
    emulate: bool = True,
    force: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> Quantized:
    """Quantize `model` for `target`, prove the result, and then write it to `output`.

    Args:
        model: float32 ONNX model.
        data: calibration samples: Data, or only a source (a path, a list, a CalibrationDataReader).
        target: "auto", a target, a profile, or a path to a TOML file.
        val: held-out samples for the proof, with labels if `task` is given. With None, `data` is used.
        statistics: folder written by `edgeq calibrate`, instead of a calibration pass.
        overrides: fields of `Scheme` to set instead of the profile's; None values are ignored.
        fix: numbers for free sizes of the inputs, by name. Some hardware needs every size to be fixed.
        task: the task that measures accuracy by labels, or its name if it needs no options.
        head: what the outputs mean: the name of a family of heads, such as "yolov8" or "ctc:blank=last", or "none".
            With None, files next to the model, its metadata and the outputs decide.
        threshold: the score from which an answer counts, or "float-recall"; then bundles record the threshold that
            gives the float model's recall back. With None, the head's own threshold counts.
        cut_head: end the graph in front of joined rows or of the selection of boxes. The runner of a bundle does the
            rest, so an NPU needs no TopK, and boxes share no scale with scores.
        output: the file to write. Default: MODEL.int8.onnx next to the model, with the suffix of the target's format.
        max_drop: largest loss of accuracy: a fraction such as 0.01, or text such as "1pt" or "1%"; needs `task`.
        effort: effort of a repair: "quick", "default" or "thorough". With labels, a result is repaired if its loss is
            above `max_drop` (default: one point). Without labels, it is repaired if an output has less than 20 dB SQNR.
            With None, or if there is a `builder`, nothing is repaired.
        require_coverage: share of MACs that must run on integers: 0.95 or "95%".
        builder: function that builds the artifact from the job and the scheme. It replaces the target's backend; see
            `edgeq.recovering`.
        engine: engine that runs the artifact in the proof, such as "onnxruntime" or "openvino:bf16". None means
            onnxruntime's own kernels.
        timed: whether to time the result against float32 on this machine.
        emulate: whether to measure coverage on emulated kernels if the target's own kernels do not run here.
        workers: a number of processes that share the samples, or the address of a Dask scheduler. Timings are still
            taken on this machine.

    Raises:
        CheckFailedError: a limit is missed. Nothing is written.
        RuntimeUnavailableError: `require_coverage` is given, but coverage cannot be measured here.
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
        targets=target,
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
    return run_quantize(request, output, engine=engine, builder=builder)


def run_quantize(
    request: Request,
    output: str | Path | None = None,
    *,
    engine: EngineChoice | str | None = None,
    builder: Builder | None = None,
) -> Quantized:
    """Make one artifact for the request's only target.

    1. Plan: choose the scheme, and refuse what cannot succeed.
    2. Prepare the model, and open its samples.
    3. Calibrate: one float32 pass gives the ranges.
    4. Choose a mitigation, if the target's kernels can saturate.
    5. Build the artifact with the scheme.
    6. Prove the artifact, and repair it if it falls short.
    7. Write the artifact next to its final path, and put it there if nothing failed.

    Args and errors: see `quantize`.
    """
    watch = Stopwatch(request.progress)
    request = replace(request, progress=watch)
    # 1. Everything that can be refused is refused here, because the next steps take minutes.
    plan = _plan(request, output, engine, builder)
    with (
        _naming(plan.output),
        scratch_folder("edgeq-") as folder,
        _draft(plan) as draft,
        open_workers(request.workers) as workers,
    ):
        # 2. The names of excluded nodes are looked up here, before the calibration.
        job = _prepare(plan, Path(folder), workers)
        # 3. Statistics that `calibrate` wrote replace the pass.
        job = collect_statistics(job, request.statistics)
        builds = Builds(job, job.folder, timed=plan.timed, emulate=request.emulate)
        # 4. The candidates are built and measured, so this step needs the statistics.
        decision = _decide(plan, builds)
        scheme = plan.scheme if decision is None else decision.chosen.scheme
        # 5. An artifact in another format is built as ONNX in the scratch folder, and converted when it is written.
        model = draft if plan.suffix == ONNX else Path(folder) / f"{draft.stem}{ONNX}"
        built = build_at(builds, plan.target, scheme, model, builder=builder, engine=plan.engine, raced=plan.timed)
        # 6. A limit that is missed raises an error, so the output is not written.
        built, proof = _prove(plan, builds, built, scheme, model)
        # 7. The artifact may have further files, which are named after the output.
        built, tables = _write(built, model, draft)
        size = model_bytes(draft)
    artifact = built.artifact
    return Quantized(
        output=plan.output,
        target=plan.target,
        scheme=artifact.scheme,
        session_options=artifact.session_options,
        proof=proof,
        bytes_float=model_bytes(request.model),
        bytes_int8=size,
        native=runs_natively(plan.target, plan.machine),
        notes=tuple(_notes(job, built, proof, plan.engine, [plan.output.with_name(name) for name in tables])),
        decision=decision,
        seconds=watch.seconds(),
        block_compute=artifact.details.get(DETAIL),
        estimate=artifact.details.get(ESTIMATE),
    )


@dataclass(frozen=True)
class _QuantizePlan:
    """Hold what is decided before any work.

    Attributes:
        suffix: suffix of the output's format.
        timed: whether timings on this machine count: they are wanted, and the target's code runs here, even if another
            profile fits this machine better.
    """

    request: Request
    machine: Machine
    target: Target
    scheme: Scheme
    output: Path
    suffix: str
    engine: EngineChoice | None
    builder: Builder | None
    timed: bool


def _plan(
    request: Request, output: str | Path | None, engine: EngineChoice | str | None, builder: Builder | None
) -> _QuantizePlan:
    """Return the plan for a request.

    Raises:
        UsageError: an argument has the wrong type, or arguments exclude each other.
        OutputError: the output is refused.
        RuntimeUnavailableError: the required coverage cannot be measured here.
    """
    if builder is not None and not callable(builder):
        raise UsageError(f"the builder is given as {type(builder).__name__}", "Give edgeq.recovering(NAME, ...)")
    choice = as_engine(engine) if engine is not None else None
    machine = detect_machine()
    target = resolve(request.only_target(), machine)
    place = path_of(
        default_output(request.model, f".int8{file_suffix(target)}") if output is None else output, "output"
    )
    check_model_name(place)
    request.check_output(place, bundle=False)
    suffix = check_suffix(place, target, choice)
    (scheme,) = request.schemes([target])
    if request.require_coverage is not None:
        plugin = choice.engine if choice is not None else None
        check_measurable([target], machine, engine=plugin, emulate=request.emulate)
    timed = request.timed and not target.profile.missing(machine)
    return _QuantizePlan(request, machine, target, scheme, place, suffix, choice, builder, timed)


def _draft(plan: _QuantizePlan) -> AbstractContextManager[Path]:
    """Return the file to write instead of the output. It becomes the output when the `with` block ends."""
    return output_file(
        plan.output,
        force=plan.request.force,
        ours=lambda path: any(backend.owns(path) for _, backend in REGISTRY.items()),
        beside=data_names(plan.output, plan.request.model),
    )


def _prepare(plan: _QuantizePlan, folder: Path, workers: Workers | None) -> Job:
    return prepare(
        plan.request,
        folder,
        static=plan.scheme.mode == "static",
        exclude=plan.scheme.exclude,
        adopting=REGISTRY.load(plan.target.backend).adopts_quantized,
        workers=workers,
        machine=plan.machine,
    )


def _decide(plan: _QuantizePlan, builds: Builds) -> Decision | None:
    """Return the decision about kernels that can saturate, or None if there is nothing to decide."""
    plugin = plan.engine.engine if plan.engine is not None and plan.engine.engine.module else None
    if plan.builder is not None or not must_decide(plan.target, plan.scheme, plan.request.overrides, plugin):
        return None
    return decision_for(builds, plan.target, plan.scheme, plugin)


def _prove(plan: _QuantizePlan, builds: Builds, built: Built, scheme: Scheme, model: Path) -> tuple[Built, Proof]:
    """Return the build and its proof. If the build falls short, a repaired build replaces it in the file `model`.

    Raises:
        CheckFailedError: a limit of the request is missed.
    """
    request, job = plan.request, builds.job
    # A user's builder has done its own repairs.
    effort = request.effort if plan.builder is None else None
    # Timings on this machine say nothing about a target's own runtime.
    timed = plan.timed and runs_natively(plan.target, plan.machine) and built.artifact.simulation is None
    repairer = Repairer(builds, effort, request.max_drop, frozenset(request.overrides), timed=not timed)
    limit = allowed_drop(request.max_drop, job.task)
    plain = keep_plain(builds, built, scheme, limit) if timed and effort is not None else None
    original = built
    built, proof = repairer.prove(original, scheme, native=True, destination=model)
    if timed:
        form = compare_forms(job, request, ProvenForm(built, proof), plain if built is not original else None)
        if plain is not None and form.built is plain.built:
            job.progress.note("the repair is left out: it is slower, and labels allow the plain build's loss")
            form = hand_over(form, model)
        built, proof = form.built, form.proof
    built = finished(job, built)
    proof = simulated_proof(job, built, replace(proof, coverage=built.artifact.coverage or proof.coverage))
    proof.check(max_drop=request.max_drop, require_coverage=request.require_coverage)
    return built, proof


def _write(built: Built, model: Path, draft: Path) -> tuple[Built, list[str]]:
    """Write `model` to `draft`, and the artifact's other files next to it. Return the build with its estimate, which
    needs the files, and the names of its tables.
    """
    if model != draft:
        shutil.copyfile(EngineFiles(model.parent).convert_once(model, built.artifact.settings().engine), draft)
    built = replace(built, artifact=backend_for(built.target).estimated(built.artifact))
    for name, file in built.artifact.files.items():
        if file.parent != draft.parent:
            shutil.copyfile(file, draft.with_name(name))
    tables = {f"{draft.stem}.{file.name}": file for file in built.artifact.tables}
    for name, file in tables.items():
        shutil.copyfile(file, draft.with_name(name))
    return built, list(tables)


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Name the output in the error of a failed check."""
    try:
        yield
    except CheckFailedError as error:
        raise unwritten(error, str(output)) from error


def build_at(
    builds: Builds,
    target: Target,
    scheme: Scheme,
    draft: Path,
    *,
    builder: Builder | None,
    engine: EngineChoice | None,
    raced: bool,
) -> Built:
    """Build the artifact for `target` with `scheme`, and write it to `draft`. If `engine` is given, the artifact is for
    that engine.

    Args:
        raced: whether timings on this machine may choose the type in which matrix products with 4-bit weights are
            computed.

    Raises:
        CheckFailedError: the target's onnxruntime cannot run the artifact.
        EdgeqError: the backend or the builder failed.
    """
    job = builds.job
    if builder is None:
        built = builds.build_at(target, scheme, draft)
    else:
        built = builder(job, target, scheme, draft, job.progress)
    raced = raced and engine is None and scheme.float_compute is None and runs_natively(target, job.machine)
    if raced and must_race(built.artifact.details.get(DETAIL)):
        built = race_compute(job, built)
    runtime_requirements(job, target, built.artifact)
    return built if engine is None else replace(built, artifact=built.artifact.in_engine(engine))


def _notes(job: Job, built: Built, proof: Proof, engine: EngineChoice | None, tables: Sequence[Path]) -> Iterator[str]:
    artifact, name = built.artifact, built.target.name
    yield from (*job.prepared.notes, *artifact.notes, *proof.opening.notes)
    yield from (f"it needs {file}" for file in tables)
    if engine is not None and engine.engine.module:
        yield f"proven in {engine.name}"
    if artifact.simulation is not None:
        yield f"checked in simulation on a CPU, not on {name}"
    elif not runs_natively(built.target, job.machine) and artifact.device == "cpu":
        yield f"answers were checked on this machine's kernels, which are not those of {name}"
