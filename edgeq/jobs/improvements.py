"""Improvements: where outputs follow float32 poorly, find out on few samples what helps most on this very model.

Nothing is tried where the result is good. Trials are bounded by multiply-accumulates and not by time, so that the same
model gets the same advice everywhere; options over the bound are named without a figure.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from edgeq.errors import EdgeqError
from edgeq.jobs.checks import agreements, int8_share, spread
from edgeq.jobs.job import Built, Job
from edgeq.jobs.proof import POOR_DROP, Proof, Tried
from edgeq.measure.agreement import GOOD_DB, HEALTHY_DB, worst_db
from edgeq.model.macs import node_macs
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.registry import IMPROVEMENTS, Registry

SAMPLES = 8
# Multiply-accumulates of all trials together: about a minute on two cores.
_WORK = 400_000_000_000
# The least gain of an improvement.
_WORTH_DB = 1.0
# The least share of the plain build's int8 work that an improvement must leave in int8.
_LEAST_INT8 = 0.1


@dataclass(frozen=True)
class Case:
    """A build whose result is poor, and what to try improvements on.

    Attributes:
        job: with few samples.
        scheme: what was asked for, before a backend or a builder added to it.
        built: the poor result.
        folder: for models that are tried.
        macs: multiply-accumulates of one inference.
    """

    job: Job
    scheme: Scheme
    built: Built
    folder: Path
    macs: int
    progress: Progress = SILENT

    def place(self) -> Path:
        """Return a new folder."""
        return Path(tempfile.mkdtemp(dir=self.folder))


@runtime_checkable
class Improvement(Protocol):
    """One kind of improvement, registered in the group `edgeq.improvements`.

    Attributes:
        name: as registered.
        title: what it does, in a few words.
        order: the lowest is tried first.
    """

    name: str
    title: str
    order: int

    def options(self, case: Case) -> tuple[str, ...]:
        """Return what to type, for each form that suits the model, the scheme and the target's backend."""

    def inferences(self, case: Case) -> int:
        """Return about how many inferences it takes to try one option."""

    def build(self, case: Case, option: str) -> tuple[str, Built]:
        """Return what to type for what was built, and that.

        Raises:
            EdgeqError: it cannot be built.
        """


REGISTRY: Registry[Improvement] = Registry(
    IMPROVEMENTS, lambda found: isinstance(found, Improvement), "edgeq.jobs.improvements.Improvement"
)


def with_improvements(job: Job, scheme: Scheme, built: Built, proof: Proof, *, progress: Progress = SILENT) -> Proof:
    """Return the proof with what would help most; as it is where labels show that accuracy is kept or, without labels,
    where its outputs are healthy."""
    poor = worst_db(proof.agreement) < HEALTHY_DB if proof.drop is None else proof.drop > POOR_DROP
    if not poor or not proof.agreement.compared or built.artifact.plugin is not None:
        return proof
    with (
        tempfile.TemporaryDirectory(prefix="improvements-", dir=job.prepared.path.parent) as folder,
        progress.stage("Trying what would help"),
    ):
        return dataclasses.replace(proof, improvements=improvements(job, scheme, built, Path(folder)))


def improvements(job: Job, scheme: Scheme, built: Built, folder: Path) -> tuple[Tried, ...]:
    """Return what brings the outputs closer to float32's than `built` does, the best first.

    Figures are of few validation samples. Of two that are good, the one that leaves more in int8 is the better. What
    was too costly to try has no figure, and comes last.
    """
    macs = max(1, sum(node_macs(job.prepared.model).values()))
    few = dataclasses.replace(
        job,
        calibration=spread(job.calibration, SAMPLES) if job.calibration is not None else None,
        validation=spread(job.validation, SAMPLES, others=True),  # what is fitted is not judged by its own samples
        float_outputs=(),
    )
    case = Case(few, scheme, built, folder, macs)
    plain, share = _judged(case, built)
    found: list[Tried] = []
    left = _WORK
    for improvement, option in _options(case):
        work = macs * (improvement.inferences(case) + 2 * len(few.validation))
        if work > left:
            found.append(Tried(option, None, None, plain, 0))
            continue
        left -= work
        tried = _tried(case, improvement, option, plain)
        if tried is None or (tried.int8_mac_share or 0.0) < _LEAST_INT8 * share:
            continue
        found.append(tried)
        if (tried.sqnr_db or 0.0) >= GOOD_DB and (tried.int8_mac_share or 0.0) >= share / 2:
            break
    return tuple(sorted(found, key=_rank, reverse=True))


def _options(case: Case) -> Iterator[tuple[Improvement, str]]:
    for kind in sorted((kind for _, kind in REGISTRY.items()), key=lambda kind: (kind.order, kind.name)):
        for option in kind.options(case):
            yield kind, option


def _tried(case: Case, improvement: Improvement, option: str, plain: float) -> Tried | None:
    """Return what came of an improvement; None where it cannot be built, or gains nothing worth a line."""
    try:
        option, built = improvement.build(case, option)
        found, share = _judged(case, built)
    except EdgeqError:  # it is no improvement for this model then
        return None
    nodes = sorted(set(built.artifact.scheme.exclude) - set(case.built.artifact.scheme.exclude))
    if not found >= plain + _WORTH_DB:
        return None
    return Tried(option, found, share, plain, len(case.job.validation), tuple(nodes))


def _judged(case: Case, built: Built) -> tuple[float, float]:
    """Return the SQNR in dB on the few samples, and the share of the work in int8."""
    found = agreements(case.job, {"": built.artifact}, case.job.validation)[""]
    return worst_db(found), int8_share(case.job, built)


def _rank(tried: Tried) -> tuple[bool, float, float, float]:
    if tried.sqnr_db is None:
        return (False, 0.0, 0.0, 0.0)
    return (True, min(tried.sqnr_db, GOOD_DB), tried.int8_mac_share or 0.0, tried.sqnr_db)
