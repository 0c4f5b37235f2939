"""`edgeq quantize`: one model, one target, one proven artifact."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeq.atomic import output_file
from edgeq.backends import backend_named
from edgeq.backends.block_compute import DETAIL, BlockCompute
from edgeq.backends.systolic.save import belongs_to_program
from edgeq.calibrate.table import is_table
from edgeq.data.given import Data, as_data
from edgeq.display import Page
from edgeq.distributed.workers import open_workers
from edgeq.engines import EngineChoice, as_engine
from edgeq.errors import UsageError
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import Target, resolve, runs_natively
from edgeq.measure.task import Task, as_task
from edgeq.model.identify import check_model_name
from edgeq.model.load import data_beside, model_bytes
from edgeq.model.path import path_of
from edgeq.pipeline.block_race import must_race, race_compute
from edgeq.pipeline.builds import Builds, check_gain, prove_built
from edgeq.pipeline.checks import as_overrides, check_output, check_request
from edgeq.pipeline.clipping import with_unclipped
from edgeq.pipeline.improvements import with_improvements
from edgeq.pipeline.job import Built, Job, open_job, scheme_for
from edgeq.pipeline.proof import Proof
from edgeq.pipeline.saturation_mitigation import Decision, decide, must_decide
from edgeq.pipeline.target_checks import runtime_requirements
from edgeq.pipeline.target_coverage import check_measurable, target_coverage
from edgeq.progress import SILENT, Progress, Stopwatch
from edgeq.records import plain
from edgeq.scheme import Scheme

Builder = Callable[[Job, Target, Scheme, Path, Progress], Built]
"""Writes the artifact of a scheme to a path."""


@dataclass(frozen=True)
class Quantized(Page):
    """What `quantize` did.

    Attributes:
        output: the quantized model.
        scheme: what was built, after overrides.
        session_options: must be set when the model is run, or its answers change.
        bytes_float, bytes_int8: size on disk of the source and the output, with external data.
        native: whether this machine runs the target's kernels itself; if not, the proof is of this machine's.
        decision: what was done about kernels that can saturate; None where there are none.
        seconds: what each stage took, by its title.
        block_compute: what products with weights in blocks compute in; None where there are none.
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

    def __brief__(self) -> dict[str, Any]:
        known = {"output": self.output, "target": self.target.name, "scheme": self.scheme.title}
        return {
            **known,
            "bytes": self.bytes_int8,
            "of_float32": self.bytes_int8 / self.bytes_float,
            **self.proof.__brief__(),
        }

    def __page__(self) -> dict[str, Any]:
        variant = {**plain(self), "title": self.target.title, "bytes": self.bytes_int8}
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
            **plain(self.proof),
        }


def quantize(
    model: str | Path,
    data: Data | Any | None,
    output: str | Path,
    *,
    target: str | Path = "auto",
    validation: Data | Any | None = None,
    statistics: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    fix: Mapping[str, int] | None = None,
    task: Task | str | None = None,
    max_drop: float | None = None,
    require_coverage: float | None = None,
    builder: Builder | None = None,
    engine: EngineChoice | str | None = None,
    timed: bool = True,
    emulate: bool = True,
    force: bool = False,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> Quantized:
    """Quantize `model` for `target` and prove the result before it takes its place at `output`.

    Args:
        model: float32 ONNX model.
        data: calibration samples: Data, or a source alone (a path, a list, a CalibrationDataReader).
        target: "auto", a target, a profile, or a path to a TOML file.
        validation: held-out samples for the proof, labelled where `task` is given; None proves on `data`.
        statistics: folder written by `edgeq calibrate`, instead of a calibration pass.
        overrides: fields of `Scheme` to set instead of the profile's; None values are ignored.
        fix: numbers for free sizes of the inputs, by name; some hardware needs every size fixed.
        task: what to measure by labels: a task, or the name of one that needs no options.
        max_drop: accuracy that may be lost at most, as a fraction (0.01 is one point); needs `task`.
        require_coverage: share of MACs that must run on integers.
        builder: what builds the artifact from the job and the scheme, instead of the target's backend alone; see
            `edgeq.recovering`.
        engine: what executes the artifact in the proof, as "onnxruntime" or "openvino:bf16"; None takes onnxruntime's
            own kernels.
        timed: whether to time it against float32 on this machine.
        emulate: whether coverage is measured on an emulation of the target's kernels where those do not run here.
        workers: a number of processes to share the samples among, or the address of a Dask scheduler; what is timed is
            timed here.

    Raises:
        CheckFailedError: a bar is not met; nothing is written then.
        RuntimeUnavailableError: `require_coverage` is given and cannot be measured here.
        UsageError: an argument of another type, or an unknown task or engine.
        EdgeqError: as the stages have it.
    """
    progress = watch = Stopwatch(progress)
    model, output = path_of(model), path_of(output, "output")
    if builder is not None and not callable(builder):
        raise UsageError(f"the builder is given as {type(builder).__name__}", "Give edgeq.recovering(NAME, ...)")
    statistics = path_of(statistics, "statistics") if statistics is not None else None
    task, engine = as_task(task), as_engine(engine) if engine is not None else None
    data, validation = samples = as_data(data), as_data(validation)
    check_model_name(output)
    check_output(output, kind="file", force=force, model=model, samples=samples, statistics=statistics)
    machine = detect_machine()
    chosen = resolve(target, machine)
    overrides = as_overrides(overrides)
    check_request([chosen], overrides, task=task, max_drop=max_drop)
    if require_coverage is not None:
        check_measurable([chosen], machine, engine=engine.engine if engine is not None else None, emulate=emulate)
    native = runs_natively(chosen, machine)
    with (
        tempfile.TemporaryDirectory(prefix="edgeq-") as workdir,
        output_file(
            output,
            force=force,
            ours=lambda place: belongs_to_program(place) or is_table(place),
            beside=data_beside(output, model),
        ) as draft,
        open_workers(workers) as pool,
    ):
        scheme = scheme_for(chosen, overrides)
        job = open_job(
            model,
            data,
            validation,
            Path(workdir),
            statistics=statistics,
            static=scheme.mode == "static",
            exclude=scheme.exclude,
            adopting=backend_named(chosen.backend).adopts_quantized,
            fix=fix,
            workers=pool,
            machine=machine,
            progress=progress,
        )
        decision = None
        plugin = engine.engine if engine is not None and engine.engine.module else None
        builds = Builds(job, Path(workdir), task=task, progress=progress)
        if builder is None and must_decide(chosen, scheme, overrides, plugin):
            decision = decide(builds, chosen, scheme, machine, engine=plugin, progress=progress)
            scheme = decision.chosen.scheme
        if builder is None:
            built = builds.build_at(chosen, scheme, draft)
        else:
            built = builder(job, chosen, scheme, draft, progress)
        compute = built.artifact.details.get(DETAIL)
        timed = timed and not chosen.profile.missing(machine)
        if engine is None and native and timed and scheme.float_compute is None and must_race(compute):
            built = race_compute(job, built, Path(workdir), progress=progress)
        runtime_requirements(chosen, built.artifact)
        if engine is not None:
            built = dataclasses.replace(built, artifact=built.artifact.in_engine(engine))
        coverage = target_coverage(job, built, machine, emulate=emulate, progress=progress)
        check_gain(job, built, coverage)
        proof = prove_built(job, built, coverage, task=task, timed=timed, progress=progress)
        proof = with_unclipped(job, built, proof, progress=progress)
        proof = with_improvements(job, scheme, built, proof, progress=progress)
        proof.check(max_drop=max_drop, require_coverage=require_coverage)
        bytes_int8 = model_bytes(draft)
        beside = [f"{draft.stem}.{file.name}" for file in built.artifact.tables]
        for name, file in zip(beside, built.artifact.tables, strict=True):
            shutil.copyfile(file, draft.with_name(name))
    notes = [
        *job.prepared.notes,
        *built.artifact.notes,
        *proof.opening.notes,
        *(f"it needs {output.with_name(name)}" for name in beside),
    ]
    if engine is not None and engine.engine.module:
        notes.append(f"proven in {engine.name}")
    if built.artifact.simulation is not None:
        notes.append(f"checked in simulation on a CPU: nothing of {chosen.name} was run")
    elif not native and built.artifact.device == "cpu":
        notes.append(f"answers were checked on this machine's kernels, which are not those of {chosen.name}")
    return Quantized(
        output=output,
        target=chosen,
        scheme=built.artifact.scheme,
        session_options=built.artifact.session_options,
        proof=proof,
        bytes_float=model_bytes(model),
        bytes_int8=bytes_int8,
        native=native,
        notes=tuple(notes),
        decision=decision,
        seconds=watch.seconds(),
        block_compute=built.artifact.details.get(DETAIL),
    )
