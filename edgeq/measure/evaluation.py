"""`edgeq eval` as a function: a model or bundle, data, a task, perhaps a reference, to figures.

Accuracy and latency of several models in one pass over the samples.

Both need each model to run about a hundred times, so the runs that are timed are the evaluation's: what the race asks
for next is the next sample. Models take turns in bursts and go at their own pace, so samples wait until all have run
them; a model that has run all that wait runs the very first one again. Decoding and judging happen between rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from edgeq_device.cuda import shapes_of
from edgeq_device.engines import FLOAT
from edgeq_device.latency import Distribution, Runner
from edgeq_device.scenarios import query_runner

from edgeq.data.samples import Samples, Shard, Sharded, SourceSamples, open_samples
from edgeq.distributed.workers import Files, Workers, files_for, open_workers
from edgeq.errors import DataError, UsageError
from edgeq.measure.accuracy import Accuracy, Collected, Evaluation, RunningEvaluation, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.bench import LoadedModel, Opener, is_bundle, open_model, race, refuse_ignored
from edgeq.measure.coverage import Coverage, measure_coverage
from edgeq.measure.latency import Outputs, Session, infer
from edgeq.measure.task import Task, TaskOptions, make_task, split_task_options
from edgeq.model.load import model_files
from edgeq.run.engines import choose_engine, described
from edgeq.run.session import SessionSettings, given_options
from edgeq.util.display import SILENT, Advance, Progress
from edgeq.util.registry import names_function

if TYPE_CHECKING:
    from edgeq.data.records import Sample


@dataclass(frozen=True)
class ModelAt:
    """A model file or bundle, and how it is opened; without a number of threads, with one."""

    path: Path
    settings: SessionSettings
    variant: str | None = None


@dataclass(frozen=True)
class EvaluationJob:
    """What a worker does: the figures of `models` over a shard.

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
    """`edgeq.measure.accuracy.evaluate_sessions` on workers, with the same result.

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
    return running.result(settings or {}, progress)


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate.

    Attributes:
        model: model file or bundle.
        data: as `edgeq.data.samples.open_samples` takes it.
        task: name of a task, or "path.py:factory"; None with a reference measures agreement only.
        options: of the task.
        reference: a second model or bundle, run on the same samples.
        variant: of a bundle; None takes the one that fits this machine.
        preprocess: None takes the bundle's, or none.
        labels, count, start, stride: as `open_samples` takes them.
        settings: for model files; a bundle brings its own. A reference runs in onnxruntime's own kernels.
    """

    model: Path
    data: Any
    task: str | None = None
    options: TaskOptions = field(default_factory=TaskOptions)
    reference: Path | None = None
    variant: str | None = None
    preprocess: Any = None
    labels: Any = None
    count: int | None = None
    start: int = 0
    stride: int = 1
    settings: SessionSettings = field(default_factory=SessionSettings)


def request_from_options(given: Mapping[str, Any]) -> EvalRequest:
    """A request from flat options: the fields of `EvalRequest`, those of tasks (`split_task_options`), `threads`,
    `optimization`, `session_options` (each "key=value"), and `engine` as `choose_engine` takes it."""
    options, remaining = split_task_options(given)
    settings = SessionSettings(
        config=given_options(remaining.pop("session_options")),
        intra_op_threads=remaining.pop("threads"),
        optimization=remaining.pop("optimization"),
    )
    if engine := remaining.pop("engine", None):
        choice = choose_engine(engine)
        settings = dataclasses.replace(settings, engine=choice.engine, precision=choice.precision)
    return EvalRequest(**remaining, options=options, settings=settings)


@dataclass(frozen=True)
class EvalResult:
    """What was found. `accuracy` and the reference's are None without a task, `agreement` without a reference;
    `coverage` is of a plug-in engine's own execution graph, else None."""

    request: EvalRequest
    variant: str | None
    settings: SessionSettings
    count: int
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    reference_variant: str | None
    agreement: Agreement | None
    coverage: Coverage | None = None

    @property
    def loss(self) -> float | None:
        """How much worse than the reference, in the primary metric's unit."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.accuracy.loss_against(self.reference_accuracy)

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        accuracy, reference = self.accuracy, self.reference_accuracy
        return {
            "model": str(self.request.model),
            "variant": self.variant,
            "data": str(self.request.data),
            "count": self.count,
            "task": accuracy.task if accuracy else None,
            "primary": accuracy.primary if accuracy else None,
            "higher_is_better": accuracy.higher_is_better if accuracy else None,
            "metrics": dict(accuracy.metrics) if accuracy else {},
            "options": {name: _plain(value) for name, value in self.request.options.given().items()},
            "settings": self.settings,
            "coverage": self.coverage,
            "reference": {
                "model": str(self.request.reference),
                "variant": self.reference_variant,
                "metrics": dict(reference.metrics) if reference else {},
                "loss": self.loss,
                "agreement": self.agreement,
            }
            if self.agreement
            else None,
        }


def run_evaluation(
    request: EvalRequest,
    *,
    opener: Opener | None = None,
    workers: int | str | Workers | None = None,
    progress: Progress = SILENT,
) -> EvalResult:
    """Open everything, run every sample once, and measure.

    Args:
        opener: where the model runs; None is this machine, where a reference always does.
        workers: a number of processes to share the samples among, the address of a Dask scheduler, or what
            `edgeq.distributed.workers.open_workers` gave. Without `opener`.

    Raises:
        UsageError: neither a task nor a reference, or an option that makes no sense.
        EdgeqError: whatever is wrong with the model, the bundle or the data.
    """
    if request.task is None and request.reference is None:
        raise UsageError("nothing to measure", "Give a --task for labelled data, or a --reference to compare with")
    task = make_task(request.task, request.options) if request.task is not None else None
    if task is None and request.options.given():
        raise UsageError("task options without a task", "Give a --task")
    refuse_ignored(request.settings, *(path for path in (request.model, request.reference) if path is not None))
    with ExitStack() as stack:
        pool = stack.enter_context(open_workers(workers))  # they start while the model is opened
        loaded = stack.enter_context(
            open_model(request.model, request.settings, variant=request.variant, opener=opener)
        )
        loaded_models, given = {"model": loaded}, {"model": request.settings}
        if request.reference is not None:
            given["reference"] = dataclasses.replace(request.settings, engine=None, precision=FLOAT)
            loaded_models["reference"] = stack.enter_context(open_model(request.reference, given["reference"]))
            _check_same_inputs(loaded, loaded_models["reference"])
        preprocess = request.preprocess if request.preprocess is not None else loaded.preprocess
        samples = open_samples(
            request.data,
            loaded.signature,
            preprocess=preprocess,
            labels=request.labels,
            count=request.count,
            start=request.start,
            stride=request.stride,
            model=request.model if loaded.variant is None else None,
            progress=progress,
        )
        settings = {key: s.settings for key, s in loaded_models.items()}
        compared = "reference" if request.reference is not None else None
        if pool is None:
            sessions = {key: s.session for key, s in loaded_models.items()}
            found = evaluate_sessions(
                sessions, samples, task=task, reference=compared, settings=settings, progress=progress
            )
        else:
            own = request.task is not None and names_function(request.task)
            found = evaluate_on(
                pool,
                {key: ModelAt(s.path, given[key], s.variant) for key, s in loaded_models.items()},
                samples,
                task=task,
                made_of=(str(request.task), request.options) if own else None,
                reference=compared,
                settings=settings,
                progress=progress,
            )
        coverage = _coverage(loaded, next(iter(samples)).inputs) if opener is None else None
    reference = loaded_models.get("reference")
    return EvalResult(
        request=request,
        variant=loaded.variant,
        settings=loaded.settings,
        count=found.count,
        accuracy=found.accuracy.get("model"),
        reference_accuracy=found.accuracy.get("reference"),
        reference_variant=reference.variant if reference else None,
        agreement=found.agreement.get("model"),
        coverage=coverage,
    )


def _coverage(loaded: LoadedModel, feed: Mapping[str, Any]) -> Coverage | None:
    """What of a model runs in which precision, where a plug-in runs it."""
    if described(loaded.settings.engine) is None:
        return None
    return measure_coverage(loaded.model, loaded.settings, feed, loaded.graph, lambda name, op_type: "")


def _check_same_inputs(loaded: LoadedModel, reference: LoadedModel) -> None:
    names: Mapping[str, list[str]] = {s.name: sorted(i.name for i in s.signature.inputs) for s in (loaded, reference)}
    if len({tuple(inputs) for inputs in names.values()}) > 1:
        listed = "; ".join(f"{name} takes {', '.join(inputs)}" for name, inputs in names.items())
        raise UsageError(f"the models' inputs differ: {listed}", "Compare models with the same inputs")


def _plain(value: object) -> Any:
    return str(value) if isinstance(value, Path) else value


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
    """`evaluate_sessions` in the same pass as `race`, which may end before or after the samples do.

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
    return running.result(settings or {}, progress), timed


@dataclass
class _Waiting:
    """A sample, and what the models that have run it made of it."""

    sample: Sample
    outputs: dict[str, Outputs]

    @property
    def nbytes(self) -> int:
        """Of the sample's inputs and of all outputs that are held."""
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
