"""Accuracy of candidates on workers: each worker measures whole candidates, and keeps samples and float32's outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq.backends import Artifact
from edgeq.data.samples import SourceSamples
from edgeq.data.shards import Sharded
from edgeq.distributed.files import Files, files_for
from edgeq.distributed.workers import Workers
from edgeq.measure.loaded_model import open_model
from edgeq.measure.task import Task
from edgeq.model.load import model_files
from edgeq.pipeline.job import Job
from edgeq.report.tuning_record import Assessment
from edgeq.session import SessionSettings
from edgeq.tune.accuracy import AccuracyMeter


@dataclass(frozen=True)
class Asked:
    """A candidate to assess, on the first `samples` samples; `together` as `AccuracyMeter.assess` has it."""

    name: str
    model: Files
    settings: SessionSettings
    samples: int
    together: bool

    def __str__(self) -> str:
        return f"the first {self.samples} samples, in {self.name}"


@dataclass(frozen=True)
class AssessmentJob:
    """What a worker does: `AccuracyMeter.assess`."""

    samples: SourceSamples
    float_model: Files
    task: Task | None
    seen_only: bool
    memory: int

    def open(self, stack: ExitStack) -> Callable[[Asked], Assessment]:
        """See `edgeq.distributed.job.Job`."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgeq-worker-")))
        meter = AccuracyMeter(
            self.samples,
            self.float_model.place(stack),
            folder,
            task=self.task,
            seen_only=self.seen_only,
            memory=self.memory,
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


def assessor(workers: Workers, job: Job, *, task: Task | None, seen_only: bool, memory: int) -> AssessmentJob | None:
    """What workers do for the candidates of `job`; None where they cannot read its samples themselves."""
    reference = Sharded(job.validation, workers).reference
    if reference is None:
        return None
    path = job.prepared.path
    return AssessmentJob(reference, files_for(workers, path, model_files(path)[1:]), task, seen_only, memory)


def assess_on(
    workers: Workers, job: AssessmentJob, artifacts: Sequence[tuple[str, Artifact, bool]], samples: int
) -> Iterator[tuple[str, Assessment]]:
    """The assessment of each artifact, by its candidate's name, in their order.

    Args:
        artifacts: name, artifact, and whether samples may be run together.
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
