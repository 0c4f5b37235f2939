"""Artifacts of one job: what several targets need alike is built and proven once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from edgeq.backends import backend_named
from edgeq.backends.base import OptionsBackend, TargetedBackend
from edgeq.errors import ModelError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target
from edgeq.measure.coverage import Coverage
from edgeq.measure.task import Task
from edgeq.model.load import model_bytes
from edgeq.pipeline.clipping import with_unclipped
from edgeq.pipeline.improvements import with_improvements
from edgeq.pipeline.job import Built, Job, build
from edgeq.pipeline.proof import Proof, prove
from edgeq.pipeline.target_arithmetic import computed_as_there
from edgeq.pipeline.target_coverage import target_coverage
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.scheme import Scheme

# Of the work in int8, and of the bytes saved: with less of both, nothing was quantized worth the name.
_LEAST_SHARE = 0.01


def artifact_key(target: Target, scheme: Scheme) -> str:
    """What decides the artifact for `target`: targets with the same need share one."""
    own = target.name if isinstance(backend_named(target.backend), TargetedBackend) else ""
    return json.dumps([target.backend, own, plain(scheme)], sort_keys=True)


class Builds:
    """The artifacts of `job`, in a private folder.

    Args:
        task: for the proofs.
        timed: whether proofs time the artifacts against float32.
        emulate: whether a target's kernels are emulated to see what runs in int8 there.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        *,
        task: Task | None = None,
        timed: bool = True,
        emulate: bool = True,
        progress: Progress = SILENT,
    ) -> None:
        self.job, self.task = job, task
        self._folder, self._timed, self._emulate, self._progress = folder, timed, emulate, progress
        self._built: dict[str, Built] = {}
        self._proofs: dict[tuple[str, bool, str], Proof] = {}
        self._coverage: dict[tuple[str, str, str], Coverage] = {}

    def build(self, target: Target, scheme: Scheme) -> Built:
        """The artifact for `target` by exactly this scheme.

        Raises:
            EdgeqError: as the backend has it.
        """
        key = artifact_key(target, scheme)
        if key not in self._built:
            place = self._folder / f"build-{len(self._built)}"
            place.mkdir()
            self._built[key] = self._build(target, scheme, place / "model.onnx")
        return self._for(target, self._built[key])

    def build_at(self, target: Target, scheme: Scheme, destination: Path) -> Built:
        """`build`, with the model at `destination`: a copy where it was built before and is one file.

        Raises:
            EdgeqError: as the backend has it.
        """
        known = self._built.get(artifact_key(target, scheme))
        if known is None or not _is_one_file(known):
            return self._build(target, scheme, destination)
        shutil.copyfile(known.artifact.model, destination)
        return self._for(
            target, dataclasses.replace(known, artifact=dataclasses.replace(known.artifact, model=destination))
        )

    def _build(self, target: Target, scheme: Scheme, destination: Path) -> Built:
        """A new artifact, made of one that differs in session options alone where there is one."""

        def alike(known: Built) -> bool:
            same = known.target.backend == target.backend and scheme.equals_but_options(known.artifact.scheme)
            return same and _is_one_file(known)

        backend, known = backend_named(target.backend), next(filter(alike, self._built.values()), None)
        with self._progress.stage("Quantizing"):
            if known is None or not isinstance(backend, OptionsBackend):
                return build(self.job, target, scheme, destination)
            artifact = backend.with_options(known.artifact, scheme, destination)
        return self._for(target, dataclasses.replace(known, artifact=artifact))

    def _for(self, target: Target, built: Built) -> Built:
        """What was built for another target, proven on kernels as this one has them."""
        artifact = computed_as_there(built.artifact, target, self.job.host)
        return dataclasses.replace(built, target=target, artifact=artifact)

    def prove(self, built: Built, scheme: Scheme, machine: Machine, *, native: bool) -> Proof:
        """The proof of what `build` gave for `scheme`, in the engine that the artifact names.

        Args:
            machine: this one.
            native: whether this machine's kernels are the target's, so that timings are those of the target.
        """
        timed = self._timed and native
        artifact = artifact_key(built.target, scheme)
        engine = built.artifact.engine.name if built.artifact.engine is not None else ""
        there = json.dumps(built.artifact.proof_options, sort_keys=True)
        place, key = (artifact, built.target.name, engine), (artifact + there, timed, engine)
        if place not in self._coverage:
            self._coverage[place] = target_coverage(
                self.job, built, machine, emulate=self._emulate, progress=self._progress
            )
        coverage = self._coverage[place]
        check_gain(self.job, built, coverage)
        if key not in self._proofs:
            proof = prove_built(self.job, built, coverage, task=self.task, timed=timed, progress=self._progress)
            proof = with_unclipped(self.job, built, proof, progress=self._progress)
            self._proofs[key] = with_improvements(self.job, scheme, built, proof, progress=self._progress)
        return dataclasses.replace(self._proofs[key], coverage=coverage)


def _is_one_file(built: Built) -> bool:
    return list(built.artifact.model.parent.iterdir()) == [built.artifact.model]


def prove_built(
    job: Job,
    built: Built,
    coverage: Coverage,
    *,
    task: Task | None,
    timed: bool,
    threads: int = 0,
    count: int | None = None,
    progress: Progress = SILENT,
) -> Proof:
    """`prove` of an artifact on the job's validation samples."""
    return prove(
        job.prepared,
        built.artifact,
        job.validation,
        coverage,
        held_out=job.held_out,
        task=task,
        timed=timed,
        threads=threads,
        workers=job.workers,
        count=count,
        float_outputs=job.float_outputs,
        progress=progress,
    )


def check_gain(job: Job, built: Built, coverage: Coverage) -> None:
    """Refuse a dynamic or weight-only model that is float as before, in a file that is no smaller.

    Raises:
        ModelError: names the operator that has most of the work.
    """
    scheme, total = built.artifact.scheme, coverage.int8_macs + coverage.float_macs
    if scheme.mode == "static" or coverage.int8_macs >= max(1, _LEAST_SHARE * total) or not total:
        return
    most = max(coverage.float_nodes, key=lambda node: node.macs, default=None)
    if most is None or model_bytes(built.artifact.model) < (1 - _LEAST_SHARE) * model_bytes(job.source):
        return
    raise ModelError(
        f"{job.source}: {scheme.mode} quantization leaves {coverage.float_macs / total:.2%} of the "
        f"multiply-accumulates in float and makes the file no smaller; {most.op_type} ({most.name}): {most.reason}",
        "Quantize it statically: leave out --dynamic or --weight-only (with the older calibrate.py, --static=true)",
    )
