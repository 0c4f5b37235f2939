"""Measure the accuracy of candidates on growing numbers of samples. A model never runs a sample twice.

Samples are read once and kept: in memory up to a limit, on disk beyond it. Their order is a shuffle with a fixed seed,
so any prefix represents all of them. Data folders are often sorted by class. Without the shuffle, the first tenth would
be a single class.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import pair_outputs
from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import Artifact
from edgeq.data.records import Sample
from edgeq.data.samples import Samples, Sharded, SourceSamples
from edgeq.distributed.workers import Files, Workers, files_for
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.measure.agreement import Agreement, Outputs, Session, infer
from edgeq.measure.bench import open_model
from edgeq.measure.comparison import OutputSums, rows
from edgeq.measure.task import ResampledMeter, RowMetrics, Task, loss_error
from edgeq.model.load import model_files
from edgeq.prove.job import Job
from edgeq.reporting.tuning_record import Assessment
from edgeq.run.session import SessionSettings, open_session
from edgeq.tuning.accuracy_estimate import (
    AgreementEstimate,
    LossKind,
    assess,
    confidence_interval,
    estimate_extra_loss,
    rare_row_error,
)
from edgeq.tuning.recover.costs import ColumnNoise
from edgeq.tuning.sessions import MEMORY
from edgeq.util.display import SILENT, Progress

_MAX_BATCH, _MAX_BATCH_BYTES = 32, 2**22
# Kernels may add in another order for a batch, which changes outputs slightly. A larger difference than this means that
# a sample's outputs depend on the other rows.
_ROUNDING = 1e-5


def infer_all(session: Session, samples: Sequence[Sample], *, model: str) -> list[Outputs]:
    """Return a session's outputs for each sample. If the samples are alike, they run together as one batch."""
    if len(samples) == 1 or not can_batch(samples):
        return [infer(session, sample, model=model) for sample in samples]
    outputs = infer(session, join_samples(samples), model=model)
    return [{name: array[row : row + 1] for name, array in outputs.items()} for row in range(len(samples))]


def join_samples(samples: Sequence[Sample]) -> Sample:
    """Join single-row samples into one sample with all the rows."""
    inputs = {name: np.concatenate([s.inputs[name] for s in samples]) for name in samples[0].inputs}
    return dataclasses.replace(samples[0], inputs=inputs)


def join_outputs(outputs: Sequence[Outputs]) -> Outputs:
    """Join the outputs of single-row samples into outputs with all the rows."""
    return {name: np.concatenate([answer[name] for answer in outputs]) for name in outputs[0]}


def find_batch_size(session: Any, samples: Sequence[Sample]) -> int:
    """Return how many samples like `samples` a session may run in one batch.

    Return 1 if the session's batch size is fixed, or if the samples differ in shape. Also return 1 if a sample's
    outputs depend on the other rows of a batch, as they do if ranges are measured at run time.
    """
    example = samples[0]
    free = all(len(spec.shape) > 0 and not isinstance(spec.shape[0], int) for spec in session.get_inputs())
    limit = min(_MAX_BATCH, _MAX_BATCH_BYTES // max(1, sum(array.nbytes for array in example.inputs.values())))
    if limit < 2 or len(samples) < 2 or not free or not can_batch(samples):
        return 1
    alone = [infer(session, sample) for sample in samples]
    try:
        batched = infer(session, join_samples(samples))
    except (DataError, RuntimeUnavailableError):  # the batch size is free at the inputs, but fixed inside the model
        return 1
    unchanged = all(
        len(array) == len(samples)
        and all(_is_close(array[row : row + 1], single[name]) for row, single in enumerate(alone))
        for name, array in batched.items()
    )
    return limit if unchanged else 1


def can_batch(samples: Sequence[Sample]) -> bool:
    """Return whether samples are single rows of the same shape, so that they can run in one batch."""
    shapes = [{name: array.shape for name, array in sample.inputs.items()} for sample in samples]
    single = all(shape[:1] == (1,) for shape in shapes[0].values())
    return single and all(sizes == shapes[0] for sizes in shapes) and not any("rows" in s.context for s in samples)


def _is_close(batched: np.ndarray[Any, Any], single: np.ndarray[Any, Any]) -> bool:
    if batched.shape != single.shape or batched.dtype.kind not in "fiub":
        return False
    largest = float(np.abs(single[np.isfinite(single)]).max(initial=0.0)) if single.dtype.kind == "f" else 0.0
    return np.allclose(batched, single, rtol=0, atol=_ROUNDING * largest, equal_nan=True)


_BATCH_TEST_SAMPLES = 4


_DISK_SHARE = 0.8
Arrays = Mapping[str, np.ndarray[Any, Any]]


class ArrayStore:
    """Store dicts of arrays under integer keys.

    Args:
        folder: folder for arrays that exceed `memory`; it is created if necessary.
        memory: bytes of arrays to keep in memory.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._free_bytes = memory
        self._in_memory: dict[int, Arrays] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._in_memory or self._file(key).exists()

    def add(self, key: int, arrays: Arrays) -> None:
        """Store the arrays. They must not be changed afterwards."""
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._in_memory[key] = arrays
            return
        # Names of tensors may contain any character, and numpy uses the names of arrays as file names.
        names = list(arrays)
        numbered = {f"a{i}": arrays[name] for i, name in enumerate(names)}
        np.savez(self._file(key), allow_pickle=False, names=np.array(names), **numbered)

    def get(self, key: int) -> Arrays:
        """Return the arrays under `key`, which must exist."""
        if key in self._in_memory:
            return self._in_memory[key]
        with np.load(self._file(key), allow_pickle=False) as archive:
            return {str(name): archive[f"a{i}"] for i, name in enumerate(archive["names"])}

    def _file(self, key: int) -> Path:
        return self._folder / f"{key}.npz"


class SampleStore:
    """Store samples by their position in the shuffled order. The iterator returns them in the order of the source."""

    def __init__(self, samples: Samples, folder: Path, *, memory: int = MEMORY, progress: Progress = SILENT) -> None:
        self.source, self.digest = samples.source, samples.digest
        self._arrays = ArrayStore(folder, memory)
        self._without_inputs: list[Sample] = []
        with progress.stage("reading samples", len(samples)) as advance:
            for index, sample in enumerate(samples):
                if index == 0:
                    _check_disk_space(sample, len(samples), memory, folder, self.source)
                self._arrays.add(index, sample.inputs)
                self._without_inputs.append(dataclasses.replace(sample, inputs={}))
                advance(1)
        if not self._without_inputs:
            raise DataError(f"{samples.source} holds no samples", "Give at least one")
        self._order = list(range(len(self._without_inputs)))
        random.Random(0).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sample]:
        return (
            dataclasses.replace(bare, inputs=self._arrays.get(index)) for index, bare in enumerate(self._without_inputs)
        )

    def source_positions(self, count: int) -> tuple[int, ...]:
        """Return the positions in the source, ascending, of the first `count` samples of the shuffled order."""
        return tuple(sorted(self._order[:count]))

    def __getitem__(self, position: int) -> Sample:
        index = self._order[position]
        return dataclasses.replace(self._without_inputs[index], inputs=self._arrays.get(index))


def _check_disk_space(sample: Sample, count: int, memory: int, folder: Path, source: str) -> None:
    """Refuse samples that would fill the disk, assuming that each is as large as the first."""
    disk_bytes = sum(array.nbytes for array in sample.inputs.values()) * count - memory
    free = shutil.disk_usage(folder).free
    if disk_bytes > _DISK_SHARE * free:
        raise DataError(
            f"{source}: {count} samples take {disk_bytes / 1e9:.1f} GB of temporary space, of {free / 1e9:.1f} GB free",
            "Give fewer validation samples, or set TMPDIR to a larger disk",
        )


class AccuracyMeter:
    """Compare sessions with float32 on validation samples. The meter keeps the samples, float32's outputs, and the
    measurements of each candidate so far.

    Args:
        float_model: the model that computes float32's outputs.
        task: what to measure by labels; None measures agreement with float32.
        loss_kind: the figure to compare with the allowed loss; see `accuracy_estimate.Held`.
        basis: what the figures of the outputs are taken over.
        memory: bytes of samples and outputs to keep in memory; the rest goes to `workdir`.
    """

    def __init__(
        self,
        validation: Samples,
        float_model: Path,
        workdir: Path,
        *,
        task: Task | None = None,
        loss_kind: LossKind = "expected",
        basis: Basis = EVERYTHING,
        memory: int = MEMORY,
        progress: Progress = SILENT,
    ) -> None:
        self._task = task
        self._loss_kind = loss_kind
        self._basis = basis
        self.samples = SampleStore(validation, workdir / "samples", memory=memory // 2, progress=progress)
        self._float_outputs = ArrayStore(workdir / "float", memory // 2)
        self._float_model = float_model
        self._float_metrics: dict[int, RowMetrics] = {}
        self._float_meter: tuple[ResampledMeter | None, int] = None, 0
        self._estimates: dict[str, _Estimate] = {}
        self._pairs: dict[str, _Pair] = {}

    @property
    def total(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    def assess(
        self,
        name: str,
        opener: Callable[[], Session],
        samples: int,
        advance: Callable[[int], None],
        *,
        together: bool = False,
    ) -> Assessment:
        """Return the accuracy of the model called `name` on the first `samples` samples.

        Args:
            opener: a function that opens the session. It is not called if no samples are left to run.
            advance: a function that is called with the number of samples that just ran.
            together: whether several samples may run in one batch, if that does not change the outputs.
        """
        estimate = self._estimates.get(name)
        if estimate is None or estimate.sample_count > samples:
            estimate = self._estimates[name] = self._start_estimate()
        if estimate.sample_count < samples:
            session = opener()
            batch_size = self._find_batch_size(session) if together else 1
            while estimate.sample_count < samples:
                positions = range(estimate.sample_count, min(samples, estimate.sample_count + batch_size))
                batch = [self.samples[position] for position in positions]
                if len(batch) > 1 and not can_batch(batch):
                    positions, batch = positions[:1], batch[:1]
                references = self._references(positions)
                estimate.add(batch, references, infer_all(session, batch, model=name))
                advance(len(positions))
        return self._assess_estimate(estimate)

    def simulate(
        self,
        name: str,
        native_session: Session,
        engine_session: Session,
        samples: int,
        overall: Assessment,
        advance: Callable[[int], None],
    ) -> tuple[Assessment, float]:
        """Estimate the loss of the model called `name` in an engine that is too slow to run all samples. Only the first
        `samples` samples run in both engines. The estimate is the loss in this machine's kernels on all samples, plus
        an estimate of the additional loss in the slow engine (`loses_more`).

        Args:
            native_session, engine_session: sessions of the model in this machine's kernels, and in the slow engine.
            overall: the model's assessment in this machine's kernels on all samples.

        Returns:
            The assessment, and half the width of a 95 % interval: how far the estimate may be from the engine's loss on
                all samples.
        """
        pair = self._pairs.setdefault(name, _Pair(self._start_estimate(), self._start_estimate()))
        for position in range(pair.engine.sample_count, samples):
            sample, reference = [self.samples[position]], self._references([position])
            (native_outputs,), (engine_outputs,) = (
                infer_all(session, sample, model=name) for session in (native_session, engine_session)
            )
            pair.native.add(sample, reference, [native_outputs])
            pair.engine.add(sample, reference, [engine_outputs])
            pair.between.update(native_outputs, engine_outputs, sample[0].inputs)
            advance(1)
        native, assessment = (self._assess_estimate(estimate) for estimate in (pair.native, pair.engine))
        if assessment.complete or assessment.low >= 1:  # all samples ran, or the outputs are not finite
            return replace(assessment, complete=True), 0.0
        error = None
        if pair.native.metric is not None and pair.engine.metric is not None:
            measured = pair.native.metric.measured(), pair.engine.metric.measured()
            error = loss_error(*measured, further=rare_row_error(measured[1], None, assessment.samples))
        more, error = estimate_extra_loss(native, assessment, error, overall, pair.between.result().least_db)
        drop = overall.drop + more
        low, high = confidence_interval(drop, error, (overall.high - overall.low) / 2)
        assessment = replace(
            assessment, complete=True, drop=drop, low=low, high=high, expected=overall.expected + more, doubt=0.0
        )
        return assessment, math.sqrt(1 - samples / self.total) * (confidence_interval(0.0, error)[1])

    def compare(self, session: Session, count: int, *, model: str) -> Agreement:
        """Return the agreement of the session's outputs with float32's on the first `count` samples."""
        comparison = OutputSums(basis=self._basis)
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            comparison.update(self._reference(position), infer(session, sample, model=model), sample.inputs)
        return comparison.result()

    def measure_noise(self, session: Session, count: int, *, model: str) -> float:
        """Return the noise power divided by the signal power of the outputs on the first `count` samples, averaged over
        the outputs' columns.
        """
        columns = ColumnNoise()
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            outputs = infer(session, sample, model=model)
            for pair in pair_outputs(self._basis, self._reference(position), outputs, sample.inputs):
                r, c = pair.numbers()
                columns.update({pair.name: r}, {pair.name: c})
        return columns.noise

    def float_metrics(self) -> dict[str, float]:
        """Return float32's metrics over all samples; empty without a task."""
        return dict(self._measure_float(self.total).metrics) if self._task is not None else {}

    def _start_estimate(self) -> _Estimate:
        """Return an estimate without any samples yet."""
        metric = None if self._task is None else ResampledMeter(self._task)
        return _Estimate(metric, AgreementEstimate(OutputSums(self._task, self._basis)))

    def _assess_estimate(self, estimate: _Estimate) -> Assessment:
        """Return the assessment of a model on the samples that it has run so far."""
        labels = None
        if self._task is not None and estimate.metric is not None:
            labels = self._task, self._measure_float(estimate.sample_count), estimate.metric.measured()
        complete = estimate.sample_count >= self.total
        return assess(estimate.agreement, labels, complete=complete, loss_kind=self._loss_kind)

    def _measure_float(self, samples: int) -> RowMetrics:
        """Return float32's metric over the first `samples` samples. If a later call has more samples, only the new ones
        are measured.
        """
        if samples not in self._float_metrics:
            metric, measured_count = self._float_meter
            if metric is None or measured_count > samples:
                assert self._task is not None
                metric, measured_count = ResampledMeter(self._task), 0
            for position in range(measured_count, samples):
                for row, outputs in rows(self.samples[position], {"float": self._reference(position)}):
                    metric.update(outputs["float"], row)
            self._float_metrics[samples] = metric.measured()
            self._float_meter = metric, samples
        return self._float_metrics[samples]

    def _reference(self, position: int) -> Outputs:
        """Return float32's outputs for the sample at `position`."""
        return self._references([position])[0]

    def _references(self, positions: Sequence[int]) -> list[Outputs]:
        """Return float32's outputs for the samples at `positions`. Each output is computed only once."""
        missing = [position for position in positions if position not in self._float_outputs]
        if missing:
            session, batch_size = self._float_session
            for start in range(0, len(missing), batch_size):
                part = missing[start : start + batch_size]
                batch_outputs = infer_all(session, [self.samples[position] for position in part], model="float32")
                for position, outputs in zip(part, batch_outputs, strict=True):
                    self._float_outputs.add(position, outputs)
        return [self._float_outputs.get(position) for position in positions]

    @cached_property
    def _float_session(self) -> tuple[Session, int]:
        """Return a session of the float model, and the number of samples that it runs at once."""
        session = open_session(self._float_model)
        return session, self._find_batch_size(session)

    def _find_batch_size(self, session: Session) -> int:
        return find_batch_size(
            session, [self.samples[position] for position in range(min(_BATCH_TEST_SAMPLES, self.total))]
        )


@dataclass
class _Estimate:
    """Hold a candidate's measurements so far, and the number of samples that they come from."""

    metric: ResampledMeter | None
    agreement: AgreementEstimate
    sample_count: int = 0

    def add(self, samples: Sequence[Sample], references: Sequence[Outputs], candidates: Sequence[Outputs]) -> None:
        """Add samples with the outputs of float32 and of the candidate. The candidate is compared with float32, and
        with the label if there is one. If there are several samples, each must be a single row.
        """
        if len(samples) > 1:
            self.agreement.update(
                join_outputs(references), join_outputs(candidates), join_samples(samples), rows=len(samples)
            )
        for sample, reference, candidate in zip(samples, references, candidates, strict=True):
            for row, outputs in rows(sample, {"float": reference, "int8": candidate}):
                if len(samples) == 1:
                    self.agreement.update(outputs["float"], outputs["int8"], row)
                if self.metric is not None:
                    self.metric.update(outputs["int8"], row)
        self.sample_count += len(samples)


@dataclass
class _Pair:
    """Hold the measurements of one model in two engines on the same samples, and how closely the engines agree."""

    native: _Estimate
    engine: _Estimate
    between: OutputSums = field(default_factory=OutputSums)


@dataclass(frozen=True)
class AssessmentRequest:
    """Describe a candidate to assess on the first `samples` samples. For `together`, see `AccuracyMeter.assess`."""

    name: str
    model: Files
    settings: SessionSettings
    samples: int
    together: bool

    def __str__(self) -> str:
        return f"the first {self.samples} samples, in {self.name}"


@dataclass(frozen=True)
class AssessmentJob:
    """Run `AccuracyMeter.assess` in a worker."""

    samples: SourceSamples
    float_model: Files
    task: Task | None
    loss_kind: LossKind
    memory: int
    basis: Basis

    def open(self, stack: ExitStack) -> Callable[[AssessmentRequest], Assessment]:
        """See `edgeq.distributed.workers.WorkerJob`."""
        folder = stack.enter_context(scratch_folder("edgeq-worker-"))
        meter = AccuracyMeter(
            self.samples,
            self.float_model.place(stack),
            folder,
            task=self.task,
            loss_kind=self.loss_kind,
            memory=self.memory,
            basis=self.basis,
        )

        def run(request: AssessmentRequest) -> Assessment:
            with ExitStack() as resources:
                path = request.model.place(resources)
                settings = replace(request.settings, intra_op_threads=request.settings.intra_op_threads or 1)
                loaded = resources.enter_context(open_model(path, settings))
                return meter.assess(
                    request.name, lambda: loaded.session, request.samples, lambda count: None, together=request.together
                )

        return run


def build_assessment_job(
    workers: Workers, job: Job, *, task: Task | None, loss_kind: LossKind, memory: int
) -> AssessmentJob | None:
    """Return the job that workers run to assess the candidates of `job`; None if they cannot read its samples."""
    reference = Sharded(job.validation, workers).reference
    if reference is None:
        return None
    path = job.prepared.path
    return AssessmentJob(reference, files_for(workers, path, model_files(path)[1:]), task, loss_kind, memory, job.basis)


def assess_on(
    workers: Workers, job: AssessmentJob, artifacts: Sequence[tuple[str, Artifact, bool]], samples: int
) -> Iterator[tuple[str, Assessment]]:
    """Yield each candidate's name and assessment, in the order of `artifacts`.

    Args:
        artifacts: for each candidate its name, its artifact, and whether its samples may run in one batch.
    """
    requests = [
        AssessmentRequest(
            name,
            files_for(workers, artifact.proof_model, model_files(artifact.proof_model)[1:]),
            artifact.proof_settings(),
            samples,
            together,
        )
        for name, artifact, together in artifacts
    ]
    yield from zip((request.name for request in requests), workers.map(job, requests), strict=True)
