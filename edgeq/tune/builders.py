"""What a candidate is built with: the target's backend, accuracy recoveries, and builders of other kinds.

A builder brings candidates of its own: a quantizer that no scheme describes (fused attention, weight-only). It is a
value with a name, in `BUILDERS`, and is used wherever `Candidate.builder` names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from edgeq.hardware.target import Target
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.job import build as build_scheme
from edgeq.progress import Progress
from edgeq.tune.candidate import Candidate


class Builder(Protocol):
    @property
    def name(self) -> str: ...

    def candidates(self, job: Job, target: Target) -> tuple[Candidate, ...]:
        """Those worth trying for this model; empty where it does not fit. Each has `builder` set to `name`."""

    def build(self, job: Job, target: Target, candidate: Candidate, destination: Path, progress: Progress) -> Built:
        """Write the candidate's model to `destination`.

        Raises:
            EdgeqError: it cannot be built; the search drops it with that reason.
        """


BUILDERS: Mapping[str, Builder] = {}


def build(job: Job, target: Target, candidate: Candidate, destination: Path, progress: Progress) -> Built:
    """The candidate's model at `destination`, by its builder or the target's backend, with its recoveries."""
    if candidate.builder:
        return BUILDERS[candidate.builder].build(job, target, candidate, destination, progress)
    scheme = {f.name: getattr(candidate.scheme, f.name) for f in dataclasses.fields(candidate.scheme)}
    return build_scheme(job, target, scheme, destination)


def recoveries() -> tuple[str, ...]:
    """Names of the accuracy recoveries, cheapest first."""
    return ()


def exclude(
    job: Job,
    built: Built,
    candidate: Candidate,
    loss: Callable[[Candidate], float],
    max_drop: float,
    expired: Callable[[], bool],
    progress: Progress,
) -> tuple[Candidate, ...]:
    """Candidates made from `candidate` with layers kept in float, until one loses at most `max_drop`."""
    return ()
