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
from edgeq.tuning.accuracy_estimate import AgreementEstimate, Held, assess, further_error, loses_more, sure
from edgeq.tuning.recover.costs import Columns
from edgeq.tuning.sessions import MEMORY
from edgeq.util.display import SILENT, Progress

_MOST, _MOST_BYTES = 32, 2**22
# Kernels may add in another order for a batch, which changes outputs slightly. A larger difference than this means that
# a sample's outputs depend on the other rows.
_ROUNDING = 1e-5


def answers(session: Session, samples: Sequence[Sample], *, model: str) -> list[Outputs]:
    """Return a session's outputs for each sample. If the samples are alike, they run together as one batch."""
    if len(samples) == 1 or not alike(samples):
        return [infer(session, sample, model=model) for sample in samples]
    made = infer(session, gathered(samples), model=model)
    return [{name: array[row : row + 1] for name, array in made.items()} for row in range(len(samples))]


def gathered(samples: Sequence[Sample]) -> Sample:
    """Join single-row samples into one sample with all the rows."""
    inputs = {name: np.concatenate([s.inputs[name] for s in samples]) for name in samples[0].inputs}
    return dataclasses.replace(samples[0], inputs=inputs)


def joined(outputs: Sequence[Outputs]) -> Outputs:
    """Join the outputs of single-row samples into outputs with all the rows."""
    return {name: np.concatenate([answer[name] for answer in outputs]) for name in outputs[0]}


def run_at_once(session: Any, samples: Sequence[Sample]) -> int:
    """Return how many samples like `samples` a session may run in one batch.

    Return 1 if the session's batch size is fixed, or if the samples differ in shape. Also return 1 if a sample's
    outputs depend on the other rows of a batch, as they do if ranges are measured at run time.
    """
    first = samples[0]
    free = all(len(spec.shape) > 0 and not isinstance(spec.shape[0], int) for spec in session.get_inputs())
    most = min(_MOST, _MOST_BYTES // max(1, sum(array.nbytes for array in first.inputs.values())))
    if most < 2 or len(samples) < 2 or not free or not alike(samples):
        return 1
    alone = [infer(session, sample) for sample in samples]
    try:
        beside = infer(session, gathered(samples))
    except (DataError, RuntimeUnavailableError):  # the batch size is free at the inputs, but fixed inside the model
        return 1
    right = all(
        len(array) == len(samples)
        and all(_close(array[row : row + 1], single[name]) for row, single in enumerate(alone))
        for name, array in beside.items()
    )
    return most if right else 1


def alike(samples: Sequence[Sample]) -> bool:
    """Return whether samples are single rows of the same shape, so that they can run in one batch."""
    shapes = [{name: array.shape for name, array in sample.inputs.items()} for sample in samples]
    single = all(shape[:1] == (1,) for shape in shapes[0].values())
    return single and all(other == shapes[0] for other in shapes) and not any("rows" in s.context for s in samples)


def _close(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    if one.shape != other.shape or one.dtype.kind not in "fiub":
        return False
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=0.0)) if other.dtype.kind == "f" else 0.0
    return np.allclose(one, other, rtol=0, atol=_ROUNDING * largest, equal_nan=True)


_TRIED = 4


_MOST_OF_DISK = 0.8
Arrays = Mapping[str, np.ndarray[Any, Any]]


class ArrayStore:
    """Store dicts of arrays under integer keys.

    Args:
        folder: folder for arrays that exceed `memory`; it is created if necessary.
        memory: bytes of arrays to keep in memory.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        self._left = memory
        self._held: dict[int, Arrays] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._held or self._file(key).exists()

    def put(self, key: int, arrays: Arrays) -> None:
        """Store the arrays. They must not be changed afterwards."""
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._left:
            self._left -= size
            self._held[key] = arrays
            return
        # Names of tensors may contain any character, and numpy uses the names of arrays as file names.
        names = list(arrays)
        numbered = {f"a{i}": arrays[name] for i, name in enumerate(names)}
        np.savez(self._file(key), allow_pickle=False, names=np.array(names), **numbered)

    def get(self, key: int) -> Arrays:
        """Return the arrays under `key`, which must exist."""
        if key in self._held:
            return self._held[key]
        with np.load(self._file(key), allow_pickle=False) as archive:
            return {str(name): archive[f"a{i}"] for i, name in enumerate(archive["names"])}

    def _file(self, key: int) -> Path:
        return self._folder / f"{key}.npz"


class SampleStore:
    """Store samples by their position in the shuffled order. The iterator returns them in the order of the source."""

    def __init__(self, samples: Samples, folder: Path, *, memory: int = MEMORY, progress: Progress = SILENT) -> None:
        self.source, self.digest = samples.source, samples.digest
        self._arrays = ArrayStore(folder, memory)
        self._bare: list[Sample] = []
        with progress.stage("reading samples", len(samples)) as advance:
            for index, sample in enumerate(samples):
                if index == 0:
                    _check_disk_space(sample, len(samples), memory, folder, self.source)
                self._arrays.put(index, sample.inputs)
                self._bare.append(dataclasses.replace(sample, inputs={}))
                advance(1)
        if not self._bare:
            raise DataError(f"{samples.source} holds no samples", "Give at least one")
        self._order = list(range(len(self._bare)))
        random.Random(0).shuffle(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sample]:
        return (dataclasses.replace(bare, inputs=self._arrays.get(index)) for index, bare in enumerate(self._bare))

    def first(self, count: int) -> tuple[int, ...]:
        """Return the positions in the source, ascending, of the first `count` samples of the shuffled order."""
        return tuple(sorted(self._order[:count]))

    def __getitem__(self, position: int) -> Sample:
        index = self._order[position]
        return dataclasses.replace(self._bare[index], inputs=self._arrays.get(index))


def _check_disk_space(sample: Sample, count: int, memory: int, folder: Path, source: str) -> None:
    """Refuse samples that would fill the disk, assuming that each is as large as the first."""
    needed = sum(array.nbytes for array in sample.inputs.values()) * count - memory
    free = shutil.disk_usage(folder).free
    if needed > _MOST_OF_DISK * free:
        raise DataError(
            f"{source}: {count} samples take {needed / 1e9:.1f} GB of temporary space, of {free / 1e9:.1f} GB free",
            "Give fewer validation samples, or set TMPDIR to a larger disk",
        )


class AccuracyMeter:
    """Compare sessions with float32 on validation samples. The meter keeps the samples, float32's outputs, and the
    measurements of each candidate so far.

    Args:
        float_model: the model that computes float32's outputs.
        task: what to measure by labels; None measures agreement with float32.
        held: the figure to compare with the allowed loss; see `accuracy_estimate.Held`.
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
        held: Held = "expected",
        basis: Basis = EVERYTHING,
        memory: int = MEMORY,
        progress: Progress = SILENT,
    ) -> None:
        self._task = task
        self._held = held
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
        session: Callable[[], Session],
        samples: int,
        advance: Callable[[int], None],
        *,
        together: bool = False,
    ) -> Assessment:
        """Return the accuracy of the model called `name` on the first `samples` samples.

        Args:
            session: a function that opens the session. It is not called if no samples are left to run.
            advance: a function that is called with the number of samples that just ran.
            together: whether several samples may run in one batch, if that does not change the outputs.
        """
        estimate = self._estimates.get(name)
        if estimate is None or estimate.seen > samples:
            estimate = self._estimates[name] = self._started()
        if estimate.seen < samples:
            opened = session()
            most = self._most_at_once(opened) if together else 1
            while estimate.seen < samples:
                chosen = range(estimate.seen, min(samples, estimate.seen + most))
                taken = [self.samples[position] for position in chosen]
                if len(taken) > 1 and not alike(taken):
                    chosen, taken = chosen[:1], taken[:1]
                references = self._references(chosen)
                estimate.add(taken, references, answers(opened, taken, model=name))
                advance(len(chosen))
        return self._assessed(estimate)

    def simulate(
        self, name: str, here: Session, there: Session, samples: int, whole: Assessment, advance: Callable[[int], None]
    ) -> tuple[Assessment, float]:
        """Estimate the loss of the model called `name` in an engine that is too slow to run all samples. Only the first
        `samples` samples run in both engines. The estimate is the loss in this machine's kernels on all samples, plus
        an estimate of the additional loss in the slow engine (`loses_more`).

        Args:
            here, there: sessions of the model in this machine's kernels, and in the slow engine.
            whole: the model's assessment in this machine's kernels on all samples.

        Returns:
            The assessment, and half the width of a 95 % interval: how far the estimate may be from the engine's loss on
                all samples.
        """
        pair = self._pairs.setdefault(name, _Pair(self._started(), self._started()))
        for position in range(pair.there.seen, samples):
            sample, reference = [self.samples[position]], self._references([position])
            (mine,), (other,) = (answers(session, sample, model=name) for session in (here, there))
            pair.here.add(sample, reference, [mine])
            pair.there.add(sample, reference, [other])
            pair.between.update(mine, other, sample[0].inputs)
            advance(1)
        same, found = (self._assessed(estimate) for estimate in (pair.here, pair.there))
        if found.complete or found.low >= 1:  # all samples ran, or the outputs are not finite
            return replace(found, complete=True), 0.0
        error = None
        if pair.here.metric is not None and pair.there.metric is not None:
            measured = pair.here.metric.measured(), pair.there.metric.measured()
            error = loss_error(*measured, further=further_error(measured[1], None, found.samples))
        more, error = loses_more(same, found, error, whole, pair.between.result().least_db)
        drop = whole.drop + more
        low, high = sure(drop, error, (whole.high - whole.low) / 2)
        found = replace(found, complete=True, drop=drop, low=low, high=high, expected=whole.expected + more, doubt=0.0)
        return found, math.sqrt(1 - samples / self.total) * (sure(0.0, error)[1])

    def compare(self, session: Session, count: int, *, model: str) -> Agreement:
        """Return the agreement of the session's outputs with float32's on the first `count` samples."""
        comparison = OutputSums(basis=self._basis)
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            comparison.update(self._reference(position), infer(session, sample, model=model), sample.inputs)
        return comparison.result()

    def noise(self, session: Session, count: int, *, model: str) -> float:
        """Return the noise power divided by the signal power of the outputs on the first `count` samples, averaged over
        the outputs' columns.
        """
        columns = Columns()
        for position in range(min(count, self.total)):
            sample = self.samples[position]
            outputs = infer(session, sample, model=model)
            for pair in pair_outputs(self._basis, self._reference(position), outputs, sample.inputs):
                r, c = pair.to_numbers()
                columns.update({pair.name: r}, {pair.name: c})
        return columns.noise

    def float_metrics(self) -> dict[str, float]:
        """Return float32's metrics over all samples; empty without a task."""
        return dict(self._float_measured(self.total).metrics) if self._task is not None else {}

    def _started(self) -> _Estimate:
        """Return an estimate without any samples yet."""
        metric = None if self._task is None else ResampledMeter(self._task)
        return _Estimate(metric, AgreementEstimate(OutputSums(self._task, self._basis)))

    def _assessed(self, estimate: _Estimate) -> Assessment:
        """Return the assessment of a model on the samples that it has run so far."""
        labels = None
        if self._task is not None and estimate.metric is not None:
            labels = self._task, self._float_measured(estimate.seen), estimate.metric.measured()
        complete = estimate.seen >= self.total
        return assess(estimate.agreement, labels, complete=complete, held=self._held)

    def _float_measured(self, samples: int) -> RowMetrics:
        """Return float32's metric over the first `samples` samples. If a later call has more samples, only the new ones
        are measured.
        """
        if samples not in self._float_metrics:
            metric, seen = self._float_meter
            if metric is None or seen > samples:
                assert self._task is not None
                metric, seen = ResampledMeter(self._task), 0
            for position in range(seen, samples):
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
            session, most = self._float_session
            for start in range(0, len(missing), most):
                part = missing[start : start + most]
                made = answers(session, [self.samples[position] for position in part], model="float32")
                for position, outputs in zip(part, made, strict=True):
                    self._float_outputs.put(position, outputs)
        return [self._float_outputs.get(position) for position in positions]

    @cached_property
    def _float_session(self) -> tuple[Session, int]:
        """Return a session of the float model, and the number of samples that it runs at once."""
        session = open_session(self._float_model)
        return session, self._most_at_once(session)

    def _most_at_once(self, session: Session) -> int:
        return run_at_once(session, [self.samples[position] for position in range(min(_TRIED, self.total))])


@dataclass
class _Estimate:
    """Hold a candidate's measurements so far, and the number of samples that they come from."""

    metric: ResampledMeter | None
    agreement: AgreementEstimate
    seen: int = 0

    def add(self, samples: Sequence[Sample], references: Sequence[Outputs], candidates: Sequence[Outputs]) -> None:
        """Add samples with the outputs of float32 and of the candidate. The candidate is compared with float32, and
        with the label if there is one. If there are several samples, each must be a single row.
        """
        if len(samples) > 1:
            self.agreement.update(joined(references), joined(candidates), gathered(samples), rows=len(samples))
        for sample, reference, candidate in zip(samples, references, candidates, strict=True):
            for row, outputs in rows(sample, {"float": reference, "int8": candidate}):
                if len(samples) == 1:
                    self.agreement.update(outputs["float"], outputs["int8"], row)
                if self.metric is not None:
                    self.metric.update(outputs["int8"], row)
        self.seen += len(samples)


@dataclass
class _Pair:
    """Hold the measurements of one model in two engines on the same samples, and how closely the engines agree."""

    here: _Estimate
    there: _Estimate
    between: OutputSums = field(default_factory=OutputSums)


@dataclass(frozen=True)
class Asked:
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
    held: Held
    memory: int
    basis: Basis

    def open(self, stack: ExitStack) -> Callable[[Asked], Assessment]:
        """See `edgeq.distributed.workers.WorkerJob`."""
        folder = stack.enter_context(scratch_folder("edgeq-worker-"))
        meter = AccuracyMeter(
            self.samples,
            self.float_model.place(stack),
            folder,
            task=self.task,
            held=self.held,
            memory=self.memory,
            basis=self.basis,
        )

        def run(asked: Asked) -> Assessment:
            with ExitStack() as opened:
                path = asked.model.place(opened)
                settings = replace(asked.settings, intra_op_threads=asked.settings.intra_op_threads or 1)
                loaded = opened.enter_context(open_model(path, settings))
                return meter.assess(
                    asked.name, lambda: loaded.session, asked.samples, lambda done: None, together=asked.together
                )

        return run


def assessor(workers: Workers, job: Job, *, task: Task | None, held: Held, memory: int) -> AssessmentJob | None:
    """Return the job that workers run to assess the candidates of `job`; None if they cannot read its samples."""
    reference = Sharded(job.validation, workers).reference
    if reference is None:
        return None
    path = job.prepared.path
    return AssessmentJob(reference, files_for(workers, path, model_files(path)[1:]), task, held, memory, job.basis)


def assess_on(
    workers: Workers, job: AssessmentJob, artifacts: Sequence[tuple[str, Artifact, bool]], samples: int
) -> Iterator[tuple[str, Assessment]]:
    """Yield each candidate's name and assessment, in the order of `artifacts`.

    Args:
        artifacts: for each candidate its name, its artifact, and whether its samples may run in one batch.
    """
    asked = [
        Asked(
            name,
            files_for(workers, artifact.proof_model, model_files(artifact.proof_model)[1:]),
            artifact.proof_settings(),
            samples,
            together,
        )
        for name, artifact, together in artifacts
    ]
    yield from zip((one.name for one in asked), workers.map(job, asked), strict=True)
