"""Artifacts of one job: what several targets need alike is built and proven once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from edgeq.backends import backend_named
from edgeq.backends.base import TargetedBackend
from edgeq.hardware.target import Target
from edgeq.measure.task import Task
from edgeq.model.load import model_files
from edgeq.pipeline.job import Built, Job, build
from edgeq.pipeline.proof import Proof, prove
from edgeq.pipeline.reasons import explainer
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.scheme import Scheme


def artifact_key(target: Target, scheme: Scheme) -> str:
    """What decides the artifact for `target`: targets with the same need share one."""
    own = target.name if isinstance(backend_named(target.backend), TargetedBackend) else ""
    return json.dumps([target.backend, own, plain(scheme)], sort_keys=True)


class Builds:
    """The artifacts of `job`, in a private folder.

    Args:
        task: for the proofs.
        timed: whether proofs time the artifacts against float32.
    """

    def __init__(
        self, job: Job, folder: Path, *, task: Task | None = None, timed: bool = True, progress: Progress = SILENT
    ) -> None:
        self.job, self.task = job, task
        self._folder, self._timed, self._progress = folder, timed, progress
        self._built: dict[str, Built] = {}
        self._proofs: dict[tuple[str, bool], Proof] = {}

    def build(self, target: Target, scheme: Scheme) -> Built:
        """The artifact for `target` by exactly this scheme.

        Raises:
            EdgeqError: as the backend has it.
        """
        key = artifact_key(target, scheme)
        if key not in self._built:
            place = self._folder / f"build-{len(self._built)}"
            place.mkdir()
            self._built[key] = build(self.job, target, scheme.fields(), place / "model.onnx")
        return dataclasses.replace(self._built[key], target=target)

    def prove(self, built: Built, scheme: Scheme, *, native: bool) -> Proof:
        """The proof of what `build` gave for `scheme`.

        Args:
            native: whether this machine's kernels are the target's, so that timings are those of the target.
        """
        timed = self._timed and native
        key = (artifact_key(built.target, scheme), timed)
        if key not in self._proofs:
            self._proofs[key] = prove_built(self.job, built, task=self.task, timed=timed, progress=self._progress)
        return self._proofs[key]


def prove_built(
    job: Job, built: Built, *, task: Task | None, timed: bool, threads: int = 0, progress: Progress = SILENT
) -> Proof:
    """`prove` with the reasons that the target's backend has for leaving nodes in float."""
    return prove(
        job.prepared,
        built.artifact,
        job.validation,
        explainer(job.prepared, built),
        held_out=job.held_out,
        task=task,
        timed=timed,
        threads=threads,
        progress=progress,
    )


def model_bytes(model: Path) -> int:
    """Size on disk, external data included."""
    return sum(file.stat().st_size for file in model_files(model))
