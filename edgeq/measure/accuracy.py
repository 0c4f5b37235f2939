"""Measure accuracy against labels, and against another model, for one or several sessions in one pass over the samples.

The samples can be shared among workers, and edgeq can time the runs. Accuracy and latency both need about a hundred
runs of each model. So edgeq times the runs of the evaluation itself: each timed run takes the next sample. The models
take turns in bursts, and each model runs at its own pace. A sample waits until all models have run it. A model that has
run all waiting samples runs the very first sample again. edgeq decodes and evaluates outputs between rounds.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from edgeq_device.engines.cuda import read_shapes
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.latency import Distribution, Runner
from edgeq_device.measure.scenarios import make_runner

from edgeq.data.open_source import Data
from edgeq.data.samples import Sample, Samples, Shard, Sharded, SourceSamples, open_samples
from edgeq.distributed.workers import Files, Workers, files_for
from edgeq.errors import CheckFailedError, DataError, UsageError
from edgeq.measure.agreement import Agreement, Outputs, Session, infer, inferences
from edgeq.measure.baseline import BaselineMargin, BaselineSums
from edgeq.measure.bench import is_bundle, open_model, race
from edgeq.measure.comparison import OutputSums, rows
from edgeq.measure.task import Task, TaskOptions, as_task, doubts, loss_interval, make_task
from edgeq.model.load import model_files, own_signature, path_of
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Advance, Displayed, Progress
from edgeq.util.records import Count, Finite


@dataclass(frozen=True)
class Accuracy(Displayed):
    """Hold the accuracy of one model, as a task measured it.

    Attributes:
        metrics: metric name → value, in the order of the task.
        samples: number of samples; each row of a gathered batch counts as one.
        task: name of the task.
        primary: name of the primary metric.
        higher_is_better: True if a higher value of the primary metric is better.
        settings: settings of the session. The same model can give other outputs under other settings.
        doubts: reasons to doubt the figures, found in labels and outputs. Each is a sentence.
    """

    metrics: Mapping[str, Finite]
    samples: Count
    task: str
    primary: str
    higher_is_better: bool
    settings: SessionSettings = field(default_factory=SessionSettings)
    doubts: tuple[str, ...] = ()

    def __brief__(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "task": self.task, "samples": self.samples, "doubts": self.doubts}

    @property
    def value(self) -> float:
        """Return the value of the primary metric."""
        return self.metrics[self.primary]

    def loss_against(self, reference: Accuracy) -> float:
        """Return how much worse this model is than `reference` in the primary metric. A negative value means better."""
        if (self.task, self.primary) != (reference.task, reference.primary):
            raise UsageError(
                f"{self.task} {self.primary} cannot be compared with {reference.task} {reference.primary}",
                "Evaluate both with the same task",
            )
        difference = reference.value - self.value
        return difference if self.higher_is_better else -difference


@dataclass(frozen=True)
class Evaluation:
    """Hold the accuracy of each session if a task was given, and its agreement with the reference if a reference was
    given.

    These attributes map session names to values. `loss_interval` has the 95 % interval of each session's loss against
    the reference over many other samples, in the unit of the primary metric. It is empty without a task or a reference,
    and lacks sessions whose interval is not known. `baseline` has the sessions with an output that resembles an input.
    """

    accuracy: Mapping[str, Accuracy]
    agreement: Mapping[str, Agreement]
    samples: int
    loss_interval: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    baseline: Mapping[str, BaselineMargin] = field(default_factory=dict)


def evaluate_sessions(
    sessions: Mapping[str, Session],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    basis: Basis = EVERYTHING,
) -> Evaluation:
    """Evaluate `sessions` in one pass over `samples`, and return all figures.

    Args:
        sessions: name → session.
        samples: samples, with labels if `task` needs them.
        task: task that measures accuracy against labels; None measures only agreement.
        reference: name of the session that the others are compared with; None compares nothing.
        settings: settings of each session, for the record.
        count: maximum number of samples.
        known: session name → its known outputs, one for each sample. edgeq does not run the sessions listed here.
        basis: what the figures of the reference's outputs are taken over.

    Raises:
        DataError: there are no samples, a sample lacks the label that the task needs, or a session refuses a sample.
        CheckFailedError: a metric is not finite.
    """
    running = RunningEvaluation(tuple(sessions), task, reference, basis)
    for sample, outputs in inferences(sessions, samples, count=count, known=known, progress=progress):
        running.update(sample, outputs)
    return running.result(settings or {})


@dataclass(frozen=True)
class Collected:
    """Hold the sums of a `RunningEvaluation` in a form that can be sent to another process. See
    `edgeq.measure.task.Meter`.
    """

    meters: Mapping[str, Any]
    comparisons: Mapping[str, OutputSums]
    count: int
    baselines: Mapping[str, BaselineSums]


class RunningEvaluation:
    """Measure several models over the samples so far, and compare each with the reference.

    Args:
        names: names of the models.
        task, reference, basis: see `evaluate_sessions`.
    """

    def __init__(
        self, names: Sequence[str], task: Task | None, reference: str | None, basis: Basis = EVERYTHING
    ) -> None:
        if reference is not None and reference not in names:
            raise UsageError(f"no session is called {reference!r}", f"The sessions are {', '.join(names)}")
        self._task, self._reference = task, reference
        self._meters = {name: task.start() for name in names} if task is not None else {}
        compared = [name for name in names if name != reference] if reference is not None else []
        self._comparisons = {name: OutputSums(task, basis) for name in compared}
        self._baselines = {name: BaselineSums() for name in compared}
        self._seen = 0

    def update(self, sample: Sample, outputs: dict[str, Outputs]) -> None:
        """Add a sample and each model's outputs for it."""
        for row, made in rows(sample, outputs):
            self._seen += 1
            for name, meter in self._meters.items():
                meter.update(made[name], row)
            for name, comparison in self._comparisons.items():
                assert self._reference is not None
                comparison.update(made[self._reference], made[name], row.inputs)
                self._baselines[name].update(made[self._reference], made[name], row.inputs)

    def collected(self) -> Collected:
        """Return the sums so far, without the task.

        Raises:
            UsageError: the task's meters have no method `collected`.
        """
        meters = {}
        for name, meter in self._meters.items():
            if not hasattr(meter, "collected") or not hasattr(meter, "take"):
                assert self._task is not None
                raise UsageError(
                    f"the meters of {self._task.name} cannot be shared among workers",
                    "Give them `collected` and `take` (docs/eval.md), or leave --workers out",
                )
            meters[name] = meter.collected()
        bare = {
            name: replace(comparison, task=None, basis=EVERYTHING) for name, comparison in self._comparisons.items()
        }
        return Collected(meters, bare, self._seen, self._baselines)

    def take(self, part: Collected) -> None:
        """Add the sums that were collected from later samples."""
        for name, meter in self._meters.items():
            meter.take(part.meters[name])  # type: ignore[attr-defined]  # `collected` has made sure
        for name, comparison in self._comparisons.items():
            comparison.merge(part.comparisons[name])
            self._baselines[name].merge(part.baselines[name])
        self._seen += part.count

    def result(self, settings: Mapping[str, SessionSettings]) -> Evaluation:
        """Return the figures.

        Args:
            settings: settings of each session, for the record.

        Raises:
            CheckFailedError: a metric is not finite.
        """
        accuracy: dict[str, Accuracy] = {}
        for name, meter in self._meters.items():
            assert self._task is not None
            metrics = MappingProxyType(dict(meter.result()))
            bad = [metric for metric, value in metrics.items() if not math.isfinite(value)]
            if bad:
                fix = "Look for NaN in the model's outputs"
                raise CheckFailedError(f"{name}: {self._task.name} {bad[0]} is not finite", fix)
            accuracy[name] = Accuracy(
                metrics,
                self._seen,
                self._task.name,
                self._task.primary,
                self._task.higher_is_better,
                settings.get(name) or SessionSettings(),
                doubts(meter),
            )
        agreement = {name: comparison.result() for name, comparison in self._comparisons.items()}
        intervals: dict[str, tuple[float, float]] = {}
        for name in agreement if self._task is not None and self._reference is not None else ():
            assert self._task is not None
            assert self._reference is not None
            interval = loss_interval(self._task, self._meters[self._reference], self._meters[name], self._seen)
            if interval is not None:
                intervals[name] = interval
        margins = {name: margin for name, sums in self._baselines.items() if (margin := sums.result()) is not None}
        return Evaluation(
            MappingProxyType(accuracy),
            MappingProxyType(agreement),
            self._seen,
            MappingProxyType(intervals),
            MappingProxyType(margins),
        )


@dataclass(frozen=True)
class ModelAt:
    """Describe a model file or bundle and how to open it. If no number of threads is set, the model runs with one
    thread.
    """

    path: Path
    settings: SessionSettings
    variant: str | None = None


@dataclass(frozen=True)
class EvaluationJob:
    """Evaluate `models` over a shard, in a worker process.

    Attributes:
        task: a task, or the name and options of a task that only a user's own file can create.
        basis: see `evaluate_sessions`.
    """

    models: Mapping[str, tuple[Files, ModelAt]]
    samples: SourceSamples | None
    task: Task | tuple[str, TaskOptions] | None
    reference: str | None
    basis: Basis = EVERYTHING

    def open(self, stack: ExitStack) -> Callable[[Shard], Collected]:
        """Open the models, and return the function that evaluates a shard. See `WorkerJob`."""
        task = make_task(*self.task) if isinstance(self.task, tuple) else self.task
        sessions = {}
        for name, (files, model) in self.models.items():
            settings = replace(model.settings, intra_op_threads=model.settings.intra_op_threads or 1)
            opened = open_model(files.place(stack), settings, variant=model.variant)
            sessions[name] = stack.enter_context(opened).session

        def run(shard: Shard) -> Collected:
            running = RunningEvaluation(tuple(sessions), task, self.reference, self.basis)
            for sample in shard.read(self.samples):
                running.update(sample, {name: infer(s, sample, model=name) for name, s in sessions.items()})
            return running.collected()

        return run


def evaluate_on(
    workers: Workers,
    models: Mapping[str, ModelAt],
    samples: Samples,
    *,
    task: Task | None = None,
    made_of: tuple[str, TaskOptions] | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    count: int | None = None,
    basis: Basis = EVERYTHING,
    progress: Progress = SILENT,
) -> Evaluation:
    """Run `evaluate_sessions` on workers. The result is the same as without workers.

    Args:
        made_of: name and options of `task`, if workers must create the task themselves.

    Raises:
        UsageError: the task's meters cannot be shared.
        EdgeqError: for the same reasons as `evaluate_sessions`, or if a worker fails.
    """
    running = RunningEvaluation(tuple(models), task, reference, basis)
    sharded = Sharded(samples, workers, count)
    needed = {
        name: (files_for(workers, m.path, () if is_bundle(m.path) else model_files(m.path)[1:]), m)
        for name, m in models.items()
    }
    job = EvaluationJob(needed, sharded.reference, made_of or task, reference, basis)
    seen = 0
    with progress.stage("Evaluating", sharded.total) as advance:
        for part in workers.map(job, sharded.shards()):
            running.take(part)
            seen += part.count
            advance(part.count)
    if not seen:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
    return running.result(settings or {})


# Maximum number of samples that wait, and maximum number of bytes of these samples and their outputs.
_MOST_WAITING, _MOST_BYTES = 16, 2**26


def evaluate_timed(
    sessions: Mapping[str, Sequence[Any]],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    basis: Basis = EVERYTHING,
    progress: Progress = SILENT,
) -> tuple[Evaluation, Mapping[str, Distribution]]:
    """Run `evaluate_sessions` and `race` in one pass. The timing may end before or after the last sample.

    A sample whose shapes differ from those of the first sample is evaluated but not timed, because its run takes a
    different amount of work. A session in another process is timed in that process, on the first sample. Its runs on
    the other samples are not timed.

    Args:
        sessions: model name → the sessions of the model. They give the same outputs and are timed in turns.
        task, reference, settings, basis: see `evaluate_sessions`.
        known: model name → its known outputs, one for each sample. edgeq runs the models listed here only to time them.

    Returns:
        The figures, and the latencies by name.

    Raises:
        DataError, CheckFailedError: for the same reasons as `evaluate_sessions`.
    """
    running = RunningEvaluation(tuple(sessions), task, reference, basis)
    with progress.stage("Evaluating and timing", len(samples)) as advance:
        line = _Line(sessions, samples, running, advance, known)
        timed = race({name: [line.runner(name, s) for s in own] for name, own in sessions.items()}, line.move_on)
        line.finish()
    return running.result(settings or {}), timed


@dataclass
class _Waiting:
    """Hold a sample, and the outputs of the models that have already run it."""

    sample: Sample
    outputs: dict[str, Outputs]

    @property
    def nbytes(self) -> int:
        """Return the total size in bytes of the sample's inputs and of its outputs so far."""
        made = (array for outputs in self.outputs.values() for array in outputs.values())
        return sum(np.asarray(array).nbytes for array in (*self.sample.inputs.values(), *made))


class _Line:
    """Queue, in order, the samples that some models have not run yet.

    Args:
        running: evaluation to which each sample is added when all models have run it.
        advance: function that is called with the number of samples that were just added to the evaluation.
        known: model name → its known outputs, one for each sample.
    """

    def __init__(
        self,
        sessions: Mapping[str, Sequence[Any]],
        samples: Samples,
        running: RunningEvaluation,
        advance: Advance,
        known: Mapping[str, Sequence[Outputs]],
    ) -> None:
        self._known, self._joined = known, itertools.count()
        self._sessions = {name: own[0] for name, own in sessions.items()}
        self._elsewhere = {name for name, own in self._sessions.items() if hasattr(own, "query_runner")}
        self._samples: Iterator[Sample] = iter(samples)
        self._running, self._advance = running, advance
        first = next(self._samples, None)
        if first is None:
            raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
        self._again = dict(first.inputs)
        self._shapes = read_shapes(first.inputs)
        self._waiting: deque[_Waiting] = deque()
        # Size of a sample with its outputs, in bytes. It is 0 until the first sample is evaluated; until then, the
        # queue contains only this sample.
        self._largest = 0
        self._join(first)

    def runner(self, name: str, session: Any) -> Runner:
        """Return a function that runs the next sample on a session of the model `name`."""
        if name in self._elsewhere:
            elsewhere: Runner = make_runner(session, [self._again])
            return elsewhere
        return lambda: self._run(name, session)

    def _run(self, name: str, session: Session) -> None:
        for waiting in self._waiting:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(session, waiting.sample, model=name)
                return
        session.run(None, self._again)

    def move_on(self) -> None:
        """Evaluate the samples that all models have run, and add new samples to the queue."""
        done = 0
        while self._waiting and len(self._waiting[0].outputs) == len(self._sessions):
            first = self._waiting.popleft()
            self._largest = max(self._largest, first.nbytes)
            self._running.update(first.sample, first.outputs)
            done += 1
        self._advance(done)
        while len(self._waiting) < max(1, min(_MOST_WAITING, _MOST_BYTES // max(1, self._largest))):
            sample = next(self._samples, None)
            if sample is None:
                return
            self._join(sample)

    def _join(self, sample: Sample) -> None:
        place = next(self._joined)
        self._waiting.append(_Waiting(sample, {name: outputs[place] for name, outputs in self._known.items()}))
        untimed = self._elsewhere if read_shapes(sample.inputs) == self._shapes else self._sessions
        self._complete(self._waiting[-1], untimed)

    def _complete(self, waiting: _Waiting, names: Iterable[str]) -> None:
        for name in names:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(self._sessions[name], waiting.sample, model=name)

    def finish(self) -> None:
        """Run the samples that were not reached during the timing."""
        while self._waiting:
            self._complete(self._waiting[0], self._sessions)
            self.move_on()


def compare_sessions(
    reference: Session,
    candidate: Session,
    samples: Samples,
    progress: Progress = SILENT,
    *,
    count: int | None = None,
    basis: Basis = EVERYTHING,
) -> Agreement:
    """Return the agreement of the candidate with the reference, over at most `count` samples.

    For the errors, see `evaluate_sessions`.
    """
    sessions = {"reference": reference, "candidate": candidate}
    found = evaluate_sessions(sessions, samples, reference="reference", progress=progress, count=count, basis=basis)
    return found.agreement["candidate"]


def evaluate_many(
    sessions: Mapping[str, Session],
    samples: Samples,
    task: Task,
    *,
    settings: Mapping[str, SessionSettings] | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
) -> dict[str, Accuracy]:
    """Return the accuracy of several open sessions on the same samples. Each sample is decoded only once.

    For the errors, see `evaluate_sessions`.
    """
    return dict(
        evaluate_sessions(sessions, samples, task=task, settings=settings, progress=progress, count=count).accuracy,
    )


def evaluate(
    model: Path | str | bytes | Session,
    samples: Samples | Data | str | Path | Iterable[Any],
    task: Task | str,
    *,
    settings: SessionSettings | None = None,
    progress: Progress = SILENT,
    count: int | None = None,
) -> Accuracy:
    """Return the accuracy of a model file, a bundle, a serialized model or an open session.

    Args:
        model: the model; a bundle runs with its own options.
        samples: labelled samples: `edgeq.Data`, or anything else that `edgeq.open_samples` accepts or returns. An open
            session does not contain its model's signature, so it needs samples that `edgeq.open_samples` returned.
        task: a task, or the name of a task that needs no options; `edgeq.make_task` makes a task with options.
        settings: settings with which the model is opened. For an open session, they are only recorded.
        count: maximum number of samples.

    Raises:
        UsageError: the task is unknown, `model` is not a model, or `model` is an open session and the samples are not
            opened yet.
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        DataError, CheckFailedError: for the same reasons as `evaluate_sessions`.
    """
    if task is None:  # Type hints do not prevent a call with an invalid argument.
        raise UsageError("nothing to measure", 'Give a task, such as "classification"')
    chosen = as_task(task)
    with ExitStack() as stack:
        name, how = "the model", settings or SessionSettings()
        signature, preprocess, beside = None, None, None
        if isinstance(model, bytes):
            session = open_session(model, how)
            signature = None if isinstance(samples, Samples) else own_signature(model, Path(name))
        elif isinstance(model, (str, os.PathLike)) or not hasattr(model, "get_outputs"):
            loaded = stack.enter_context(open_model(path_of(model), how))
            name, how, session = loaded.name, loaded.settings, loaded.session
            signature, preprocess = loaded.signature, loaded.preprocess
            beside = loaded.path if loaded.variant is None else None
        else:
            session = model
        if not isinstance(samples, Samples):
            if signature is None:
                raise UsageError(
                    "samples cannot be opened for an open session: its signature is not known",
                    "Give the model's path instead, or samples that edgeq.open_samples returned",
                )
            samples = open_samples(samples, signature, preprocess=preprocess, model=beside, progress=progress)
        found = evaluate_many({name: session}, samples, chosen, settings={name: how}, progress=progress, count=count)
    return found[name]
