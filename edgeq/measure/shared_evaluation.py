"""Share an evaluation among workers. Each worker opens the models once, and evaluates shards of the samples.

Workers return sums, not outputs. The sums of all shards give the same figures as one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.data.samples import Samples, Shard, Sharded, SourceSamples
from edgeq.distributed.workers import Files, Workers, share_files
from edgeq.errors import DataError
from edgeq.measure.accuracy import Collected, Evaluation, RunningEvaluation
from edgeq.measure.inference import infer
from edgeq.measure.loaded_model import is_bundle, open_model
from edgeq.measure.task import Task, TaskOptions, make_task
from edgeq.model.files import model_files
from edgeq.run.session import SessionSettings
from edgeq.util.display import SILENT, Progress


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
            # The workers of a machine share its cores.
            settings = replace(model.settings, intra_op_threads=model.settings.intra_op_threads or 1)
            context = open_model(files.place(stack), settings, variant=model.variant)
            sessions[name] = stack.enter_context(context).session

        def run(shard: Shard) -> Collected:
            running = RunningEvaluation(tuple(sessions), task, self.reference, self.basis)
            for sample in shard.read_samples(self.samples):
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
    # A shard names samples of the source if workers can read them, and contains them otherwise.
    sharded = Sharded(samples, workers, count)
    # Workers may be on other machines, so the job names every file that a model needs.
    job_models = {
        name: (share_files(workers, m.path, () if is_bundle(m.path) else model_files(m.path)[1:]), m)
        for name, m in models.items()
    }
    # A task from a user's file cannot be pickled. The worker makes it from its name.
    job = EvaluationJob(job_models, sharded.reference, made_of or task, reference, basis)
    sample_count = 0
    with progress.stage("Evaluating", sharded.total) as advance:
        for part in workers.map(job, sharded.shards()):
            running.take(part)
            sample_count += part.count
            advance(part.count)
    if not sample_count:
        raise DataError(f"{samples.source}: no samples to evaluate", "Point ⟨data⟩ at samples, or raise ⟨count⟩")
    return running.result(settings or {})
