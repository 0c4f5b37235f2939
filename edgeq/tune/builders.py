"""What a candidate is built with: the target's backend, accuracy recoveries, and builders of other kinds.

A builder brings candidates of its own: a quantizer that no scheme describes (fused attention, weight-only). It is a
value with a name, in `BUILDERS`, and is used wherever `Candidate.builder` names it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edgeq.hardware.target import Target
from edgeq.model.int8_rules import int8_rules, quantizable_operators
from edgeq.model.load import load_model
from edgeq.model.macs import node_macs
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.job import build as build_scheme
from edgeq.progress import Progress
from edgeq.scheme import Scheme
from edgeq.tune.candidate import Candidate
from edgeq.tune.evaluator import Exclusion
from edgeq.tune.layers import affordable, noisy_pieces, shortest_exclusion
from edgeq.tune.recover import FREE, RECOVERIES, Recoverer
from edgeq.tune.recover.exclude import exclude_layers
from edgeq.tune.recover.smoothquant import SmoothQuant
from edgeq.tune.sequence import SequenceBuilder


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


BUILDERS: Mapping[str, Builder] = {builder.name: builder for builder in (SequenceBuilder(),)}


def build(
    job: Job, target: Target, candidate: Candidate, destination: Path, recoverer: Recoverer, progress: Progress
) -> Built:
    """The candidate's model at `destination`, by its builder or the target's backend, with its recoveries."""
    if candidate.builder:
        return BUILDERS[candidate.builder].build(job, target, candidate, destination, progress)
    if candidate.recoveries:
        return recoverer.build(candidate.scheme, candidate.recoveries, destination, progress=progress)
    scheme = {f.name: getattr(candidate.scheme, f.name) for f in dataclasses.fields(candidate.scheme)}
    return build_scheme(job, target, scheme, destination)


def recoveries() -> tuple[tuple[str, ...], ...]:
    """Names of the accuracy recoveries in groups, in the order in which they are tried: first all that cost no speed,
    then the others one by one. SmoothQuant is among the candidates of `SequenceBuilder`."""
    return (FREE, *((name,) for name in RECOVERIES if name not in (*FREE, SmoothQuant.name)))


def exclude(
    job: Job,
    target: Target,
    candidate: Candidate,
    wanted: Exclusion,
    recoverer: Recoverer,
    noise_of: Callable[[Candidate], float],
    *,
    progress: Progress,
) -> None:
    """Ask for the loss of candidates with ever more layers of `candidate` in float, until it is small enough.

    Where there are ranges to build from, layers are ranked in one pass and taken by noise for each microsecond
    (`recover.exclude`); what is measured at run time has no tensors to rank, and is taken apart instead.

    Args:
        noise_of: noise over signal of a candidate's outputs on a few samples.
    """
    named: Counter[int] = Counter()

    def measured(scheme: Scheme) -> float:
        count = len(scheme.exclude) - len(candidate.scheme.exclude)
        named[count] += 1
        again = f", choice {named[count]}" if named[count] > 1 else ""
        return wanted.loss(candidate.replace(name=f"{candidate.name}, {count} layers in float{again}", scheme=scheme))

    if candidate.scheme.mode == "static" and not candidate.builder and job.calibration is not None:
        names = candidate.recoveries
        exclude_layers(
            recoverer,
            job,
            candidate.scheme,
            names,
            measured,
            wanted.max_drop,
            wanted.expired,
            headroom=wanted.headroom,
            progress=progress,
        )
    else:
        _take_apart(job, target, candidate, noise_of, measured, wanted)


def _take_apart(
    job: Job,
    target: Target,
    candidate: Candidate,
    noise_of: Callable[[Candidate], float],
    measured: Callable[[Scheme], float],
    wanted: Exclusion,
) -> None:
    graph = load_model(job.prepared.path, external_data="none")
    done = set(candidate.scheme.exclude)
    types = _types(candidate.scheme, target)
    counted = node_macs(job.prepared.model)
    macs = {
        node.name: counted[node.name]
        for node in graph.graph.node
        if node.op_type in types and counted.get(node.name) and node.name not in done
    }
    if len(macs) < 2 or min(macs.values()) > wanted.headroom * sum(macs.values()):
        return

    def without(nodes: Iterable[str]) -> Scheme:
        return candidate.scheme.replace(exclude=(*done, *nodes))

    def noise(nodes: Sequence[str]) -> float:
        only = without(macs.keys() - set(nodes))
        # Recoveries take time, and move the noise of all layers alike, more or less.
        return noise_of(candidate.replace(name=f"{candidate.name}, only {nodes[0]}", scheme=only, recoveries=()))

    def lost(nodes: tuple[str, ...]) -> float:
        return measured(without(nodes))

    pieces = affordable(noisy_pieces(macs, noise, wanted.expired), wanted.headroom)
    shortest_exclusion(pieces, lost, wanted.max_drop, wanted.expired)


def _types(scheme: Scheme, target: Target) -> Container[str]:
    """Operator types that a scheme quantizes."""
    if scheme.mode == "dynamic":
        return scheme.dynamic_weight_types
    return scheme.op_types or quantizable_operators(int8_rules(target.backend))
