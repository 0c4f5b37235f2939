"""Accuracy and agreement in shards, on workers: each sends back what its meters collected, never outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq.data.samples import Samples, SourceSamples
from edgeq.data.shards import Shard, Sharded
from edgeq.distributed.files import Files, files_for
from edgeq.distributed.workers import Workers
from edgeq.errors import DataError
from edgeq.measure.accuracy import Collected, Evaluation, RunningEvaluation
from edgeq.measure.inference import infer
from edgeq.measure.loaded_model import is_bundle, open_model
from edgeq.measure.task import Task, TaskOptions, make_task
from edgeq.model.load import model_files
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings


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
        """See `edgeq.distributed.job.Job`."""
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
