"""Assess candidates in the processes of workers, each of which reads the samples itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from edgeq_device.measure.basis import Basis
from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import Artifact
from edgeq.data.samples import Sharded, SourceSamples
from edgeq.distributed.workers import Files, Workers, share_files
from edgeq.measure.loaded_model import open_model
from edgeq.measure.task import Task
from edgeq.model.files import model_files
from edgeq.prove.job import Job
from edgeq.run.session import SessionSettings
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.accuracy_estimate import (
    LossKind,
)
from edgeq.tuning.measurements import Assessment


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
                # Workers already run side by side, so each uses one thread unless the settings say otherwise.
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
    # Sending samples would cost more than reading them: only a reference to the source travels.
    reference = Sharded(job.validation, workers).reference
    if reference is None:
        return None
    path = job.prepared.path
    return AssessmentJob(
        reference, share_files(workers, path, model_files(path)[1:]), task, loss_kind, memory, job.basis
    )


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
            # External weights travel with the model, since a worker may be another machine without this folder.
            share_files(workers, artifact.proof_model, model_files(artifact.proof_model)[1:]),
            artifact.proof_settings(),
            samples,
            together,
        )
        for name, artifact, together in artifacts
    ]
    # `map` keeps the order of the requests, so names and results match.
    yield from zip((request.name for request in requests), workers.map(job, requests), strict=True)
