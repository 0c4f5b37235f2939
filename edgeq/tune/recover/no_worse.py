"""Builds with recoveries that are kept only where they follow the float model at least as closely as the plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.pipeline.job import Built, Job, build
from edgeq.pipeline.proof import FLOAT, simulated_count
from edgeq.progress import Progress
from edgeq.scheme import Scheme
from edgeq.session import SessionSettings
from edgeq.workers.engine import Engines

_PLAIN, _RECOVERED = "plain", "recovered"


def no_worse(
    job: Job, recovered: Built, scheme: Scheme, names: Sequence[str], workdir: Path, progress: Progress
) -> Built:
    """Return `recovered`, or the build without the recoveries `names` in its place, if that has the higher SQNR in the
    proof: the worst output's, on the validation samples.

    Args:
        scheme: of the plain build.
        workdir: an existing folder for the plain build, which must live as long as what is returned.

    Raises:
        EdgeqError: the plain build fails, or a model refuses a sample.
    """
    destination = recovered.artifact.model
    with progress.stage("Comparing with the build without recoveries"):
        plain = build(job, recovered.target, scheme, workdir / destination.name)
        found = {name: _closeness(agreement) for name, agreement in _agreements(job, plain, recovered).items()}
    if found[_RECOVERED] >= found[_PLAIN]:
        return recovered
    without = build(job, recovered.target, scheme, destination)
    note = (
        f"{', '.join(names)}: left out, as it does harm: {found[_RECOVERED]:.1f} dB SQNR against float32, "
        f"{found[_PLAIN]:.1f} dB without"
    )
    return replace(without, artifact=replace(without.artifact, notes=(*without.artifact.notes, note)))


def _agreements(job: Job, plain: Built, recovered: Built) -> dict[str, Agreement]:
    """Return how closely both follow the float model, each run as it is proven."""
    count = simulated_count(job.prepared, recovered.artifact)
    with Engines() as engines:
        sessions = {FLOAT: engines.open(job.prepared.path, SessionSettings())}
        for name, built in {_PLAIN: plain, _RECOVERED: recovered}.items():
            sessions[name] = engines.open(built.artifact.proof_model, built.artifact.proof_settings())
        known = {FLOAT: job.float_outputs} if job.float_outputs else {}
        return dict(evaluate_sessions(sessions, job.validation, reference=FLOAT, count=count, known=known).agreement)


def _closeness(agreement: Agreement) -> float:
    """Return the worst output's SQNR, minus infinity where an output is not finite."""
    finite = all(not output.nonfinite for output in agreement.outputs)
    return agreement.sqnr_db if finite else -math.inf
