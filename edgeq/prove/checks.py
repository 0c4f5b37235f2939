"""Compare built models with the float model on a few samples, and compute the share of their work that runs in int8."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.backends.base import Artifact
from edgeq.data.samples import Samples
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import FLOAT
from edgeq.run.session import open_session


def agreements(
    job: Job, artifacts: Mapping[str, Artifact], samples: Samples, *, count: int | None = None
) -> Mapping[str, Agreement]:
    """Return the agreement of each artifact with the float model over the first `count` samples, or over all samples if
    `count` is None.

    Raises:
        RuntimeUnavailableError: an artifact does not load, or fails when it runs.
    """
    # The float model runs once for all artifacts.
    sessions = {FLOAT: open_session(job.prepared.path)}
    for name, artifact in artifacts.items():
        sessions[name] = open_session(artifact.proof_model, artifact.proof_settings())
    known_outputs = {FLOAT: job.float_outputs} if job.float_outputs and samples is job.validation else {}
    return evaluate_sessions(
        sessions, samples, reference=FLOAT, count=count, known_outputs=known_outputs, basis=job.basis
    ).agreement


def int8_share(job: Job, built: Built) -> float:
    """Return the share of the multiply-accumulates that run in int8, taken from the artifact's coverage or from the
    backend's rules. Return 1 if the rules find no multiply-accumulates.
    """
    if built.artifact.coverage is not None:
        return built.artifact.coverage.int8_mac_share or 0.0
    predicted = predict_int8(job.prepared.graph, int8_rules(built.target.backend), built.artifact.scheme)
    total = sum(node.macs for node in predicted)
    return sum(node.macs for node in predicted if node.verdict == "int8") / total if total else 1.0
