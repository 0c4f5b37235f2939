"""Check a built model: its agreement with the float model, what ranges cut off, and the reasons for a poor result.

Improvements: where outputs follow float32 poorly, find out on few samples what helps most on this very model.

Nothing is tried where the result is good. Trials are bounded by multiply-accumulates and not by time, so that the same
model gets the same advice everywhere; options over the bound are named without a figure.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from edgeq.backends.base import Artifact
from edgeq.calibrate.ranges import range_noise, scheme_ranges
from edgeq.data.samples import Samples, Subset, places
from edgeq.errors import EdgeqError
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import GOOD_DB, Agreement, worst_db
from edgeq.model.int8_prediction import int8_rules, predict_int8
from edgeq.model.products import node_macs
from edgeq.model.quant_params import grid_of
from edgeq.prove.job import Built, Job, build
from edgeq.prove.proof import FLOAT, INT8, Proof, Tried
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.util.display import SILENT, Progress
from edgeq.util.registry import IMPROVEMENTS, Registry

WHOLE = "minmax"
"""The method whose ranges hold every value that calibration saw."""
# Half of the noise: by the statistics for it to be tried, and by the outputs for it to be named.
_WORTH_DB = 3.0
_SAMPLES = 16


def with_unclipped(job: Job, built: Built, proof: Proof) -> Proof:
    """Return a doubtful proof with `unclipped`, where the statistics say that clipping may be why: the model is built
    once more with ranges that hold every value, and run on a few samples."""
    scheme, statistics = built.artifact.scheme, job.statistics
    if scheme.mode != "static" or scheme.method == WHOLE or statistics is None:
        return proof
    whole = scheme.replace(method=WHOLE, method_options={})
    grid, worth = grid_of(scheme.activation_type, scheme.activation_symmetric), 10 ** (_WORTH_DB / 10)
    found, best = (
        sum(range_noise(statistics, ranges, grid).values())
        for ranges in (built.ranges, scheme_ranges(statistics, whole))
    )
    if found < worth * best:
        return proof
    place = tempfile.TemporaryDirectory(prefix="unclipped-", dir=job.folder)
    with job.progress.stage("Trying ranges that cut nothing off"), place as folder:
        other = build(job, built.target, whole, Path(folder) / "model.onnx")
        both = {INT8: built.artifact, WHOLE: other.artifact}
        found_db = {name: one.sqnr_db for name, one in agreements(job, both, job.validation, count=_SAMPLES).items()}
    clipped, unclipped = found_db[INT8], found_db[WHOLE]
    if unclipped < clipped + _WORTH_DB:
        return proof
    return dataclasses.replace(proof, unclipped=(scheme.method, clipped, unclipped))


def agreements(
    job: Job, artifacts: Mapping[str, Artifact], samples: Samples, *, count: int | None = None
) -> Mapping[str, Agreement]:
    """Return the agreement of each artifact with the float model over the first `count` of `samples`, or over all.

    Raises:
        RuntimeUnavailableError: an artifact does not load, or fails while it runs.
    """
    sessions = {FLOAT: open_session(job.prepared.path)}
    for name, artifact in artifacts.items():
        sessions[name] = open_session(artifact.proof_model, artifact.proof_settings())
    known = {FLOAT: job.float_outputs} if job.float_outputs and samples is job.validation else {}
    return evaluate_sessions(sessions, samples, reference=FLOAT, count=count, known=known).agreement


def spread(samples: Samples, count: int, *, others: bool = False) -> Samples:
    """Return `count` of the samples, spread over all: data are often sorted by class.

    Args:
        others: take those halfway between the ones that are taken without it, if there are twice as many.
    """
    if len(samples) <= count:
        return samples
    behind = len(samples) // (2 * count) if others else 0
    return Subset(samples, [place + behind for place in places(len(samples), count)])


def int8_share(job: Job, built: Built) -> float:
    """Return the share of the multiply-accumulates that run in int8, by the backend's own account or by its rules; 1
    where there are none."""
    if built.artifact.coverage is not None:
        return built.artifact.coverage.int8_mac_share or 0.0
    predicted = predict_int8(job.prepared.graph, int8_rules(built.target.backend), built.artifact.scheme)
    total = sum(node.macs for node in predicted)
    return sum(node.macs for node in predicted if node.verdict == "int8") / total if total else 1.0


SAMPLES = 8
# Multiply-accumulates of all trials together: about a minute on two cores.
_WORK = 400_000_000_000
# The least gain of an improvement.
_LEAST_GAIN_DB = 1.0
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
    IMPROVEMENTS, lambda found: isinstance(found, Improvement), "edgeq.prove.checks.Improvement"
)


def with_improvements(job: Job, scheme: Scheme, built: Built, proof: Proof) -> Proof:
    """Return a poor proof with what would help most."""
    with (
        tempfile.TemporaryDirectory(prefix="improvements-", dir=job.folder) as folder,
        job.progress.stage("Trying what would help"),
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
    if not found >= plain + _LEAST_GAIN_DB:
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
