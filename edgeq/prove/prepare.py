"""Prepare a request's model, open its samples, and collect statistics, once for any number of targets."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from edgeq_device.answers.head import Head

from edgeq.backends.base import check_names
from edgeq.calibration.collect import FloatOutputs, collect
from edgeq.calibration.files import load_statistics
from edgeq.calibration.hazards import with_hazards
from edgeq.calibration.plan import quantizable_tensors
from edgeq.calibration.ranges import Range
from edgeq.calibration.statistics import UNIT, Statistics
from edgeq.data.array_store import ArrayStore
from edgeq.data.labels import Labels
from edgeq.data.open_source import Data, has_parts, in_role
from edgeq.data.parts import find_shared_files
from edgeq.data.preprocess import Preprocess
from edgeq.data.same_preparation import Figures, InputFigures, find_differences, measure_inputs, warn_of_unlike_images
from edgeq.data.samples import Samples, SourceSamples, select_samples
from edgeq.describe.facts import Fact, ModelFacts
from edgeq.describe.read import explain_extensions, list_exported, read_facts
from edgeq.distributed.workers import Workers
from edgeq.errors import CalibrationError, ModelError, UsageError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.measure.answer_metric import with_head
from edgeq.measure.answer_task import answer_labels
from edgeq.measure.basis import find_basis, sampled_basis
from edgeq.measure.find_head import find_head
from edgeq.measure.find_task import find_classification, find_detection
from edgeq.measure.preprocess_search import open_or_search
from edgeq.measure.recordings import cut_recordings
from edgeq.measure.settle import check_skill, settle
from edgeq.measure.tasks.detection import Detection
from edgeq.model.load import is_quantized, read_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.prove.head_cut import cut_head
from edgeq.prove.job import Job
from edgeq.prove.opening import check_preparation
from edgeq.prove.request import FLOAT_RECALL, Request
from edgeq.quantization.adopt import adopt
from edgeq.run.session import open_session
from edgeq.signature import Signature
from edgeq.util.display import Progress

# The maximum numbers of bytes of the float model's outputs in memory and on disk, and of the share of the free disk. A
# model runs again on the samples whose outputs exceed them.
_OUTPUT_BYTES, _DISK_BYTES, _DISK_SHARE = 2**25, 2**31, 0.25


def prepare(
    request: Request,
    workdir: Path,
    *,
    static: bool = True,
    exclude: Sequence[str] = (),
    adopting: bool = False,
    workers: Workers | None = None,
    machine: Machine | None = None,
) -> Job:
    """Prepare the model and open its samples. Return a job without statistics.

    Args:
        static: True if any scheme needs ranges.
        exclude: names of nodes to keep in float. edgeq looks these names up before the calibration.
        adopting: True to accept a model that is already quantized (Q/DQ pairs) and use its scales and zero points.
        workers: the processes that share the samples of the calibration and the proofs.
        machine: this machine, or None to ignore differences between its kernels and those of a target.

    Raises:
        UsageError: samples are needed but were not given, `exclude` names an unknown node, or there is a limit on the
            accuracy but nothing to measure it by.
        ModelError: the model has no input, or no float tensor to quantize.
        CheckFailedError: the float model is no better than chance on the labels.
        DataError: the inputs of `data` and `val` cannot come from the same preparation.
    """
    model, data, validation, progress = request.model, request.data, request.val, request.progress
    if data is None and validation is None:
        raise UsageError("there are no samples to prove the result on", "Give ⟨data⟩ or ⟨val⟩")
    # A model that is already quantized keeps its own scales, because its weights were trained or rounded for them.
    adopted: Mapping[str, Range] = {}
    if adopting and is_quantized(read_model(model)):
        adoption = adopt(model, workdir / "adopted.onnx")
        adopted = adoption.ranges
        prepared = prepare_model(adoption.model, workdir, fix=request.fix, progress=progress)
        prepared = replace(prepared, source=model, notes=(*prepared.notes, *adoption.notes))
    else:
        try:
            prepared = prepare_model(model, workdir, fix=request.fix, progress=progress)
        except ModelError as error:
            raise explain_extensions(model, error) from error.__cause__
    if not prepared.signature.inputs:
        raise ModelError(f"{model} has no inputs", "Give a model whose inputs are not constants")
    if static and not quantizable_tensors(prepared.graph):
        if any(value.dtype == ir.DataType.DOUBLE for value in prepared.model.graph.initializers.values()):
            raise ModelError(
                f"{model} computes in float64, but quantization starts from float32",
                "Export it in float32 (PyTorch: model.float())",
            )
        raise ModelError(f"{model} computes nothing in float: there is nothing to quantize", "Give a float32 model")
    # A misspelt node would otherwise be found only after the calibration.
    check_names(prepared, exclude)
    if validation is None and data is not None and has_parts(data):
        validation = replace(data, count=None, role="validation")
    data = in_role(data, "calibration") if data is not None else None
    validation = in_role(validation, "validation") if validation is not None else None
    # The model is opened only if a task or a preprocessing must be found by running it, and then only once.
    session = functools.cache(lambda: open_session(prepared.path))
    data, validation = (
        part and cut_recordings(part, session, prepared.signature, request.head, workdir) for part in (data, validation)
    )
    facts = read_facts(list_exported(prepared.model.metadata_props, prepared.signature, model))
    for note in facts.notes:
        progress.note(note)
    task = request.task
    if task is None and validation is not None:
        task = find_detection(validation, prepared.signature, session(), progress)
    proof_data = validation if validation is not None else data
    assert proof_data is not None

    def open_data(data: Data, preprocess: Preprocess | None = None) -> Samples:
        """Open samples. If none is named for images, use the preprocessing `preprocess`, or else what
        `open_or_search` finds.
        """
        samples = open_or_search(
            data,
            prepared.signature,
            session=session,
            labelled_data=proof_data,
            task=task,
            fallback=preprocess,
            facts=facts,
            model=model,
            progress=progress,
        )
        return replace(samples, hold=workdir) if isinstance(samples, SourceSamples) else samples

    # The proof's samples come first: their labels decide the preprocessing, which both sets then share.
    proof_samples = open_data(proof_data)
    preprocess = proof_samples.preprocess if isinstance(proof_samples, SourceSamples) else None
    calibration = proof_samples if proof_data is data else None
    if data is not None and calibration is None:
        calibration = open_data(data, preprocess)
    held_out = validation is not None
    if data is not None and validation is not None:
        disjoint = _without_shared_files(calibration, proof_samples, progress)
        calibration, held_out = disjoint or (calibration, not _same_source(data.source, validation.source))
    doubts = _input_doubts(calibration, proof_samples)
    # Samples that were calibrated on flatter the result, so a part is set aside if there are enough.
    if validation is None and request.statistics is None and len(proof_samples) >= _ENOUGH:
        calibration, proof_samples = _split(proof_samples)
        held_out, every = True, len(calibration) + len(proof_samples)
        note = f"{len(proof_samples)} of the {every} samples are kept for the proof and left out of the calibration"
        prepared = replace(prepared, notes=(*prepared.notes, note))
    if not adopted:
        with progress.stage("Checking the preparation"):
            prepared = check_preparation(prepared, proof_samples)
    named = any(isinstance(d.labels, Labels) and d.labels.classes is not None for d in (data, validation) if d)
    facts, sample = _with_labels(facts, proof_samples, named=named), next(iter(proof_samples))
    head = find_head(session(), prepared.signature, sample, facts, request.head, progress)
    if head is not None and isinstance(request.threshold, float):
        head = replace(head, thresholds={**head.thresholds, "confidence": request.threshold})
    if head is None and request.threshold is not None:
        raise UsageError("⟨threshold⟩ needs a head, which says what the outputs mean", "Name one with ⟨head⟩")
    if request.cut_head:
        prepared, head = _cut(request, prepared, head, proof_samples, workdir)
        session = functools.cache(lambda: open_session(prepared.path))
    float_outputs = _open_store(workdir / "float-outputs")
    if task is None and validation is not None:
        task = find_classification(proof_samples, session(), progress, known_outputs=float_outputs)
    # A task that reads answers does so by the model's head.
    task = task.with_head(head) if isinstance(task, Detection) else with_head(task, head) if task is not None else None
    if task is not None and validation is not None:
        # If even the float model is no better than a guess, the labels or the preprocessing are wrong.
        task = settle(task, session(), proof_samples, known_outputs=float_outputs, progress=progress)
        check_skill(task, session(), proof_samples, known_outputs=float_outputs, progress=progress)
    if task is None:
        task, answered = answer_labels(proof_samples, session(), head, progress, known_outputs=float_outputs)
        # The calibration reads the same samples only if they are the same object.
        calibration = answered if calibration is proof_samples else calibration
        proof_samples = answered
    if task is None and request.max_drop is not None:
        fix = "Give labelled ⟨val⟩ data: class folders, ⟨labels⟩ FILE, or ⟨annotations⟩ FILE for a detector"
        raise UsageError("a limit on the accuracy drop needs labels", fix)
    this_machine = machine or detect_machine()
    job = Job(
        source=model,
        prepared=prepared,
        calibration=calibration,
        validation=proof_samples,
        held_out=held_out,
        statistics=None,
        adopted=adopted,
        workers=workers,
        host=match_profile(this_machine, load_profiles()).profile if machine is not None else None,
        static=static,
        machine=this_machine,
        task=task,
        head=head,
        float_recall=request.threshold == FLOAT_RECALL,
        float_outputs=float_outputs,
        progress=progress,
    )
    return _doubted(job, doubts)


def _open_store(folder: Path) -> ArrayStore:
    disk = min(_DISK_BYTES, _DISK_SHARE * shutil.disk_usage(folder.parent).free)
    return ArrayStore(folder, _OUTPUT_BYTES, disk)


def _cut(
    request: Request, prepared: PreparedModel, head: Head | None, samples: Samples, workdir: Path
) -> tuple[PreparedModel, Head]:
    """Return the model that ends in front of its last steps, and the head that reads its outputs.

    Raises:
        UsageError: nothing says what the outputs mean.
        ModelError: the model cannot be cut.
    """
    if head is None:
        raise UsageError("⟨cut_head⟩ needs a head, which says what the outputs mean", "Name one with ⟨head⟩")
    folder = workdir / "cut"
    folder.mkdir()
    with request.progress.stage("Ending the graph in front of its last steps"):
        cut = cut_head(prepared.model, head, samples, folder)
    model = prepare_model(request.model, folder, loaded=cut.model, fix=request.fix, progress=request.progress)
    outputs = ", ".join(spec.name for spec in model.signature.outputs)
    note = f"the graph ends at {outputs}; the runner does what followed"
    return replace(model, notes=(*prepared.notes, note)), cut.head


def _with_labels(facts: ModelFacts, samples: Samples, *, named: bool) -> ModelFacts:
    """Return the facts with the names of the classes that the samples' labels give, if no file states any, or if the
    user has `named` them.
    """
    names = tuple(getattr(samples, "score_names", ()))
    if not any(names) or (facts.labels is not None and not named):
        return facts
    return replace(facts, labels=Fact(names, "⟨classes⟩" if named else "the labels of the samples", assumed=not named))


def _input_doubts(calibration: Samples | None, proof: Samples) -> tuple[str, ...]:
    """Return reasons to doubt that the inputs of both sets are prepared alike, and as their preprocessing prepares
    images.

    Raises:
        DataError: the sets cannot come from the same preparation.
    """
    figures = measure_inputs(proof)
    doubts = warn_of_unlike_images(proof, figures)
    if calibration is None or calibration is proof:
        return doubts
    calibrated_on = measure_inputs(calibration)
    return (*find_differences(calibrated_on, figures), *warn_of_unlike_images(calibration, calibrated_on), *doubts)


# If there are _ENOUGH samples or more, every _PARTS-th sample is left out of the calibration.
_ENOUGH, _PARTS = 64, 4


def _split(samples: Samples) -> tuple[Samples, Samples]:
    """Split samples into those for the calibration and those for the proof. The proof gets every fourth sample, and the
    calibration does not use any of these.
    """
    proof = range(_PARTS // 2, len(samples), _PARTS)
    calibration = [number for number in range(len(samples)) if number not in proof]
    return select_samples(samples, calibration), select_samples(samples, list(proof))


def _same_source(source: Any, reference: Any) -> bool:
    """Return whether two sources are the same path or the same object, which means that both give the same first
    samples.
    """
    if isinstance(source, str | Path) and isinstance(reference, str | Path):
        return Path(source).absolute() == Path(reference).absolute()
    return source is reference


def _without_shared_files(
    calibration: Samples | None, proof: Samples, progress: Progress
) -> tuple[Samples, bool] | None:
    """Return the calibration samples without the files of the proof, and True. If no sample would be left, return all
    calibration samples, and False. Return None if the samples are not files.
    """
    if not isinstance(calibration, SourceSamples) or not isinstance(proof, SourceSamples):
        return None
    files = calibration.files()
    if not files or not proof.files():
        return None
    common_files = find_shared_files(files, proof.files())
    if not common_files:
        return calibration, True
    remaining = calibration.without(common_files)
    if not remaining.selection:
        return calibration, False
    progress.note(
        f"{len(files) - len(remaining.selection)} of {len(files)} calibration samples are also validation samples, "
        f"so they are left out of the calibration: {min(common_files).name}" + (" …" if len(common_files) > 1 else "")
    )
    return remaining, True


def collect_statistics(job: Job, statistics: Path | None = None) -> Job:
    """Return the job with the statistics of one float32 pass over the calibration samples, and with the basis of its
    figures. If no scheme is static, there are no statistics.

    Args:
        statistics: a folder that `edgeq calibrate` wrote, to read instead of running a pass.

    Raises:
        UsageError: there are no calibration samples.
        CalibrationError: `statistics` belong to another model or are not complete.
    """
    prepared, outputs = job.prepared, None
    if not job.static:
        return replace(job, basis=sampled_basis(prepared.graph, open_session(prepared.path), job.validation))
    if statistics is not None:
        collected = load_statistics(statistics)
        collected.check_model(prepared.digest, str(statistics))
        if not collected.complete:
            raise CalibrationError(f"{statistics} is unfinished", "Finish it with `edgeq calibrate ⟨resume=True⟩`")
        calibrated_on = _recorded_figures(collected, prepared.signature, str(statistics))
        job = _doubted(job, find_differences(calibrated_on, measure_inputs(job.validation)))
    else:
        if job.calibration is None:
            raise UsageError("static quantization needs calibration samples", "Give ⟨data⟩ or ⟨statistics⟩")
        if job.validation is job.calibration:
            outputs = FloatOutputs(prepared.model, len(job.calibration))
        collected = collect(
            prepared.graph,
            job.calibration,
            model_digest=prepared.digest,
            workers=job.workers,
            outputs=outputs,
            progress=job.progress,
        )
    if outputs is not None and job.float_outputs is not None:
        for place, arrays in enumerate(outputs.all()):
            if place not in job.float_outputs:
                job.float_outputs.add(place, arrays)
    return replace(
        job,
        prepared=with_hazards(prepared, collected),
        statistics=collected,
        basis=find_basis(prepared.graph, collected),
    )


def _recorded_figures(collected: Statistics, signature: Signature, source: str) -> Figures:
    """Return the figures of the inputs that statistics were collected on: the means of the samples' extrema."""
    figures = {}
    for name in [spec.name for spec in signature.inputs if spec.name in collected.tensors]:
        tensor = collected.tensors[name]
        low, high = (
            np.array([float(total) * UNIT / max(1, tensor.nonempty)])
            for total in (tensor.minimum_sum, tensor.maximum_sum)
        )
        if low.any() or high.any():
            unknown = np.array([np.nan])
            figures[name] = {"": InputFigures(source, low, high, unknown, unknown, tensor.nonempty)}
    return figures


def _doubted(job: Job, doubts: Sequence[str]) -> Job:
    """Return the job with further doubts, which are shown at once."""
    for doubt in doubts:
        job.progress.note(f"warning: {doubt}")
    return replace(job, doubts=(*job.doubts, *doubts))
