"""Build candidates with the target's backend, with recoveries, or with a builder of their own."""

from __future__ import annotations

from pathlib import Path

from edgeq.backends.base import Artifact
from edgeq.hardware.target import Target
from edgeq.prove.job import Built, DerivedValues, Job, build_derived, derive
from edgeq.run.engines import DEFAULT, EngineChoice, find_only_engine, load_engines
from edgeq.tuning.recover.run import Recoverer
from edgeq.tuning.space import Candidate, build_sequence
from edgeq.util.display import SILENT, Progress


class CandidateBuilder:
    """Build the candidates of one job, and keep the parts that several of them share.

    Args:
        workdir: an existing folder. It must exist as long as the builder is in use.

    Attributes:
        recoverer: builds candidates with accuracy recoveries.
    """

    def __init__(self, job: Job, target: Target, workdir: Path, progress: Progress = SILENT) -> None:
        self._job = job
        self._target = target
        self._progress = progress
        self._derived: dict[object, DerivedValues] = {}
        self.recoverer = Recoverer(job, target, workdir)

    def build(self, candidate: Candidate, destination: Path) -> Built:
        """Build the candidate's model at `destination`, with its recoveries. Use the candidate's own builder if it has
        one, else the target's backend.

        Raises:
            EdgeqError: the candidate cannot be built.
        """
        job, target, scheme = self._job, self._target, candidate.scheme
        if not candidate.quantized:
            artifact = Artifact(job.prepared.path, scheme, load_engines()[DEFAULT].provider)
            engine = find_only_engine(target.backend)
            return Built(target, artifact.in_engine(EngineChoice(engine)) if engine else artifact)
        if candidate.builder:
            return build_sequence(job, target, candidate, destination, self._progress)
        if candidate.recoveries:
            return self.recoverer.build(scheme, candidate.recoveries, destination, progress=self._progress)
        options = tuple(sorted(scheme.method_options.items()))
        # Only these fields decide ranges, so kernel choices that differ in others share them.
        key = (scheme.mode, scheme.method, options, scheme.activation_type, scheme.activation_symmetric, scheme.scale)
        if key not in self._derived:
            self._derived[key] = derive(job, target, scheme)
        return build_derived(job, target, scheme, self._derived[key], destination)
