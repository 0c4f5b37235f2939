"""What a candidate is built with: the target's backend, accuracy recoveries, and builders of other kinds.

A builder brings candidates of its own: a quantizer that no scheme describes (fused attention, weight-only). It is a
value with a name, in `BUILDERS`, and is used wherever `Candidate.builder` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from edgeq.backends import Artifact
from edgeq.engines import DEFAULT, load_engines
from edgeq.hardware.target import Target
from edgeq.pipeline.job import Built, Derived, Job, build_derived, derive
from edgeq.progress import SILENT, Progress
from edgeq.tune.candidate import Candidate
from edgeq.tune.recover.run import Recoverer
from edgeq.tune.sequence import SequenceBuilder


class Builder(Protocol):
    """Builds candidates of its own kind."""

    @property
    def name(self) -> str:
        """What `Candidate.builder` names it by."""

    def candidates(self, job: Job, target: Target) -> tuple[Candidate, ...]:
        """Those worth trying for this model; empty where it does not fit. Each has `builder` set to `name`."""

    def build(self, job: Job, target: Target, candidate: Candidate, destination: Path, progress: Progress) -> Built:
        """Write the candidate's model to `destination`.

        Raises:
            EdgeqError: it cannot be built; the search drops it with that reason.
        """


BUILDERS: Mapping[str, Builder] = {builder.name: builder for builder in (SequenceBuilder(),)}


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
            return BUILDERS[candidate.builder].build(job, target, candidate, destination, self._progress)
        if candidate.recoveries:
            return self.recoverer.build(scheme, candidate.recoveries, destination, progress=self._progress)
        options = tuple(sorted(scheme.method_options.items()))
        key = (scheme.mode, scheme.method, options, scheme.activation_type, scheme.activation_symmetric)
        if key not in self._derived:
            self._derived[key] = derive(job, target, scheme)
        return build_derived(job, target, scheme, self._derived[key], destination)
