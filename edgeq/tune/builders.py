"""What a candidate is built with: the target's backend, accuracy recoveries, or what no scheme describes."""

from __future__ import annotations

from pathlib import Path

from edgeq.backends import Artifact
from edgeq.engines import DEFAULT, load_engines
from edgeq.hardware.target import Target
from edgeq.pipeline.job import Built, Derived, Job, build_derived, derive
from edgeq.progress import SILENT, Progress
from edgeq.tune.candidate import Candidate
from edgeq.tune.recover.run import Recoverer
from edgeq.tune.sequence import build_sequence


class CandidateBuilder:
    """Builds candidates of one job, and keeps what several of them have in common.

    Args:
        workdir: an existing folder; it must live as long.

    Attributes:
        recoverer: builds those with accuracy recoveries.
    """

    def __init__(self, job: Job, target: Target, workdir: Path, progress: Progress = SILENT) -> None:
        self._job = job
        self._target = target
        self._progress = progress
        self._derived: dict[object, Derived] = {}
        self.recoverer = Recoverer(job, target, workdir)

    def build(self, candidate: Candidate, destination: Path) -> Built:
        """The candidate's model at `destination`, by its builder or the target's backend, with its recoveries.

        Raises:
            EdgeqError: it cannot be built.
        """
        job, target, scheme = self._job, self._target, candidate.scheme
        if not candidate.quantized:
            return Built(target, Artifact(job.prepared.path, scheme, load_engines()[DEFAULT].provider))
        if candidate.builder:
            return build_sequence(job, target, candidate, destination, self._progress)
        if candidate.recoveries:
            return self.recoverer.build(scheme, candidate.recoveries, destination, progress=self._progress)
        options = tuple(sorted(scheme.method_options.items()))
        key = (scheme.mode, scheme.method, options, scheme.activation_type, scheme.activation_symmetric)
        if key not in self._derived:
            self._derived[key] = derive(job, target, scheme)
        return build_derived(job, target, scheme, self._derived[key], destination)
