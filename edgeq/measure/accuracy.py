"""Measure accuracy against labels, and against another model, for one or several sessions in one pass over the samples.

The pass can be shared among workers, and it can be timed: accuracy and latency both need each model to run about a
hundred times, so the runs that are timed are the evaluation's: what the race asks for next is the next sample. Models
take turns in bursts and go at their own pace, so samples wait until all have run them; a model that has run all that
wait runs the very first one again. Decoding and judging happen between rounds.
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
from edgeq_device.cuda import shapes_of
from edgeq_device.latency import Distribution, Runner
from edgeq_device.scenarios import query_runner

from edgeq.data.open_source import Data
from edgeq.data.samples import Sample, Samples, Shard, Sharded, SourceSamples, open_samples
from edgeq.distributed.workers import Files, Workers, files_for
from edgeq.errors import CheckFailedError, DataError, UsageError
from edgeq.measure.agreement import Agreement, Outputs, Session, infer, inferences
from edgeq.measure.bench import is_bundle, open_model, race
from edgeq.measure.comparison import Comparison, rows
from edgeq.measure.task import Task, TaskOptions, as_task, make_task
from edgeq.model.load import model_files, own_signature, path_of
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.display import SILENT, Advance, Displayed, Progress
from edgeq.util.records import Count, Finite


@dataclass(frozen=True)
class Accuracy(Displayed):
    """Hold the accuracy of one model, as a task measured it.

    Attributes:
        metrics: metric name → value, in the order the task gives.
        count: samples, rows of gathered batches counted singly.
        task: the task's name.
        primary: the metric that decides.
        higher_is_better: of the primary metric.
        settings: how the session was opened; outputs of the same model can differ under others.
        doubts: what labels and outputs give reason to doubt, a sentence each.
    """

    metrics: Mapping[str, Finite]
    count: Count
    task: str
    primary: str
    higher_is_better: bool
    settings: SessionSettings = field(default_factory=SessionSettings)
    doubts: tuple[str, ...] = ()

    def __brief__(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "task": self.task, "samples": self.count, "doubts": self.doubts}

    @property
    def value(self) -> float:
        """Return the primary metric's value."""
        return self.metrics[self.primary]

    def loss_against(self, reference: Accuracy) -> float:
        """Return by how much this is worse than `reference` in the primary metric; negative where it is better."""
        if (self.task, self.primary) != (reference.task, reference.primary):
            raise UsageError(
                f"{self.task} {self.primary} cannot be compared with {reference.task} {reference.primary}",
                "Evaluate both with the same task",
            )
        difference = reference.value - self.value
        return difference if self.higher_is_better else -difference


@dataclass(frozen=True)
class Evaluation:
    """Hold accuracy per session name (where a task was given) and agreement with the reference (where one was
    named).
    """

    accuracy: Mapping[str, Accuracy]
    agreement: Mapping[str, Agreement]
    count: int


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
) -> Evaluation:
    """Return all figures of `sessions` from one pass over `samples`.

    Args:
        sessions: name → session.
        samples: labelled where `task` needs labels.
        task: what to measure against labels; None measures agreement only.
        reference: the session that the others are compared with; None compares nothing.
        settings: how each session was opened, for the record.
        count: take at most so many samples.
        known: what some of the sessions make of each sample, by name: these are not run.

    Raises:
        DataError: no samples, a sample without the label that the task needs, or one that a session refuses.
        CheckFailedError: a metric is not finite.
    """
    running = RunningEvaluation(tuple(sessions), task, reference)
    for sample, outputs in inferences(sessions, samples, count=count, known=known, progress=progress):
        running.update(sample, outputs)
    return running.result(settings or {})


@dataclass(frozen=True)
class Collected:
    """Hold the sums of a `RunningEvaluation`, to be sent to another process: see `edgeq.measure.task.Meter`."""

    meters: Mapping[str, Any]
    comparisons: Mapping[str, Comparison]
    count: int


class RunningEvaluation:
    """Meter each of several models, and compare it with the reference, over the samples so far.

    Args:
        names: of the models.
        task, reference: as `evaluate_sessions` has them.
    """

    def __init__(self, names: Sequence[str], task: Task | None, reference: str | None) -> None:
        if reference is not None and reference not in names:
            raise UsageError(f"no session is called {reference!r}", f"There are {', '.join(names)}")
        self._task, self._reference = task, reference
        self._meters = {name: task.start() for name in names} if task is not None else {}
        compared = [name for name in names if name != reference] if reference is not None else []
        self._comparisons = {name: Comparison(task) for name in compared}
        self._seen = 0

    def update(self, sample: Sample, outputs: dict[str, Outputs]) -> None:
        """Add a sample, with what each model made of it."""
        for row, made in rows(sample, outputs):
            self._seen += 1
            for name, meter in self._meters.items():
                meter.update(made[name], row)
            for name, comparison in self._comparisons.items():
                assert self._reference is not None
                comparison.update(made[self._reference], made[name], row.inputs)

    def collected(self) -> Collected:
        """Return the sums so far, without the task.

        Raises:
            UsageError: the task's meters have no `collected`.
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
        without = {name: replace(comparison, task=None) for name, comparison in self._comparisons.items()}
        return Collected(meters, without, self._seen)

    def take(self, part: Collected) -> None:
        """Add what was collected of later samples."""
        for name, meter in self._meters.items():
            meter.take(part.meters[name])  # type: ignore[attr-defined]  # `collected` has made sure
        for name, comparison in self._comparisons.items():
            comparison.merge(part.comparisons[name])
        self._seen += part.count

    def result(self, settings: Mapping[str, SessionSettings]) -> Evaluation:
        """Return the figures. `settings`: how each session was opened, for the record.

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
                tuple(meter.notes()) if hasattr(meter, "notes") else (),
            )
        agreement = {name: comparison.result() for name, comparison in self._comparisons.items()}
        return Evaluation(MappingProxyType(accuracy), MappingProxyType(agreement), self._seen)


@dataclass(frozen=True)
class ModelAt:
    """Describe a model file or bundle, and how it is opened; with one thread where no number is given."""

    path: Path
    settings: SessionSettings
    variant: str | None = None


@dataclass(frozen=True)
class EvaluationJob:
    """Define a worker's job: the figures of `models` over a shard.

    Attributes:
        task: one, or name and options of one that only a user's own file can make.
    """

    models: Mapping[str, tuple[Files, ModelAt]]
    samples: SourceSamples | None
    task: Task | tuple[str, TaskOptions] | None
    reference: str | None

    def open(self, stack: ExitStack) -> Callable[[Shard], Collected]:
        """See `edgeq.distributed.workers.Job`."""
        task = make_task(*self.task) if isinstance(self.task, tuple) else self.task
        sessions = {}
        for name, (files, model) in self.models.items():
            settings = replace(model.settings, intra_op_threads=model.settings.intra_op_threads or 1)
            opened = open_model(files.place(stack), settings, variant=model.variant)
            sessions[name] = stack.enter_context(opened).session

        def run(shard: Shard) -> Collected:
            running = RunningEvaluation(tuple(sessions), task, self.reference)
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
    progress: Progress = SILENT,
) -> Evaluation:
    """Run `evaluate_sessions` on workers, with the same result.

    Args:
        made_of: name and options of `task`, where workers are to make it themselves.

    Raises:
        UsageError: the task's meters cannot be shared.
        EdgeqError: as `evaluate_sessions`, and what workers raise.
    """
    running = RunningEvaluation(tuple(models), task, reference)
    sharded = Sharded(samples, workers, count)
    needed = {
        name: (files_for(workers, m.path, () if is_bundle(m.path) else model_files(m.path)[1:]), m)
        for name, m in models.items()
    }
    job = EvaluationJob(needed, sharded.reference, made_of or task, reference)
    seen = 0
    with progress.stage("Evaluating", sharded.total) as advance:
        for part in workers.map(job, sharded.shards()):
            running.take(part)
            seen += part.count
            advance(part.count)
    if not seen:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point --data at samples, or raise --count")
    return running.result(settings or {})


# Samples that wait at most, and the bytes of them with their outputs.
_MOST_WAITING, _MOST_BYTES = 16, 2**26


def evaluate_timed(
    sessions: Mapping[str, Sequence[Any]],
    samples: Samples,
    *,
    task: Task | None = None,
    reference: str | None = None,
    settings: Mapping[str, SessionSettings] | None = None,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
    progress: Progress = SILENT,
) -> tuple[Evaluation, Mapping[str, Distribution]]:
    """Run `evaluate_sessions` in the same pass as `race`, which may end before or after the samples do.

    Samples of another shape than the first one's are judged, not timed: the models would be timed on different work.
    So are all where a session is in another process, which is timed there, on the first sample.

    Args:
        sessions: name → sessions of that model, which are timed in turns and answer alike.
        task, reference, settings, known: as `evaluate_sessions` has them; what is known is run to be timed alone.

    Returns:
        The figures, and latencies by name.

    Raises:
        DataError, CheckFailedError: as `evaluate_sessions`.
    """
    running = RunningEvaluation(tuple(sessions), task, reference)
    with progress.stage("Evaluating and timing", len(samples)) as advance:
        line = _Line(sessions, samples, running, advance, known)
        timed = race({name: [line.runner(name, s) for s in own] for name, own in sessions.items()}, line.move_on)
        line.finish()
    return running.result(settings or {}), timed


@dataclass
class _Waiting:
    """A sample, and what the models that have run it made of it."""

    sample: Sample
    outputs: dict[str, Outputs]

    @property
    def nbytes(self) -> int:
        """Count the bytes of the sample's inputs and of all outputs that wait with it."""
        made = (array for outputs in self.outputs.values() for array in outputs.values())
        return sum(np.asarray(array).nbytes for array in (*self.sample.inputs.values(), *made))


class _Line:
    """The samples that wait, in order.

    Args:
        running: is given each sample that all models have run.
        advance: is called with the number of those.
        known: outputs by model, for each sample.
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
        self._shapes = shapes_of(first.inputs)
        self._waiting: deque[_Waiting] = deque()
        self._largest = 0  # bytes; known when the first sample is judged, until which no other joins
        self._join(first)

    def runner(self, name: str, session: Any) -> Runner:
        """Runs the next sample on a session of the model `name`."""
        if name in self._elsewhere:
            elsewhere: Runner = query_runner(session, [self._again])
            return elsewhere
        return lambda: self._run(name, session)

    def _run(self, name: str, session: Session) -> None:
        for waiting in self._waiting:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(session, waiting.sample, model=name)
                return
        session.run(None, self._again)

    def move_on(self) -> None:
        """Judge the samples that all models have run, and let others join."""
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
        untimed = self._elsewhere if shapes_of(sample.inputs) == self._shapes else self._sessions
        self._complete(self._waiting[-1], untimed)

    def _complete(self, waiting: _Waiting, names: Iterable[str]) -> None:
        for name in names:
            if name not in waiting.outputs:
                waiting.outputs[name] = infer(self._sessions[name], waiting.sample, model=name)

    def finish(self) -> None:
        """Run what the race has left."""
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
) -> Agreement:
    """Return the agreement of the candidate with the reference, over at most `count` samples. Errors as
    `evaluate_sessions`."""
    sessions = {"reference": reference, "candidate": candidate}
    found = evaluate_sessions(sessions, samples, reference="reference", progress=progress, count=count)
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
    """Return the accuracy of several open sessions on the same samples, each decoded once. Errors as
    `evaluate_sessions`.
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
        model: a bundle runs with the options that it carries; for an open session `settings` only records how it was
            opened.
        samples: labelled; `edgeq.Data`, or whatever else `edgeq.open_samples` takes or gives. For an open session,
            which does not carry its model's signature, only what it gives.
        task: a task, or the name of one that needs no options; `edgeq.make_task` makes one with options.
        count: take at most so many samples.

    Raises:
        UsageError: an unknown task, something that is not a model, or samples that an open session cannot open.
        ModelError, BundleError, RuntimeUnavailableError: the model cannot be opened.
        DataError, CheckFailedError: as `evaluate_sessions`.
    """
    if task is None:  # what types do not keep a caller from
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
                    "an open session does not say what samples it takes",
                    "Give the model's path instead, or samples that edgeq.open_samples gave",
                )
            samples = open_samples(samples, signature, preprocess=preprocess, model=beside, progress=progress)
        found = evaluate_many({name: session}, samples, chosen, settings={name: how}, progress=progress, count=count)
    return found[name]
