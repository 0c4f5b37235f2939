"""Whether ranges that cut values off cost more than they gain: the same model with ranges that hold every value."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from edgeq.calibrate.clipping import range_noise
from edgeq.calibrate.range_method import grid_of
from edgeq.calibrate.ranges import scheme_ranges
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.closeness import GOOD_DB
from edgeq.pipeline.job import Built, Job, build
from edgeq.pipeline.proof import FLOAT, INT8, POOR_DROP, Proof
from edgeq.progress import SILENT, Progress
from edgeq.session import open_session

WHOLE = "minmax"
"""The method whose ranges hold every value that calibration saw."""
# Half of the noise: by the statistics for it to be tried, and by the outputs for it to be named.
_WORTH_DB = 3.0
_SAMPLES = 16
_PLAIN = "int8, nothing cut off"


def with_unclipped(job: Job, built: Built, proof: Proof, *, progress: Progress = SILENT) -> Proof:
    """The proof with `unclipped`, where the outputs are poor and the statistics say that clipping may be why: the model
    is built once more with ranges that hold every value, and run on a few samples."""
    scheme, statistics = built.artifact.scheme, job.statistics
    if scheme.mode != "static" or scheme.method == WHOLE or statistics is None or built.artifact.plugin is not None:
        return proof
    if (
        not proof.agreement.compared
        or proof.agreement.sqnr_db >= GOOD_DB
        or (proof.drop is not None and proof.drop <= POOR_DROP)
    ):
        return proof
    whole = scheme.replace(method=WHOLE, method_options={})
    grid, worth = grid_of(scheme.activation_type, scheme.activation_symmetric), 10 ** (_WORTH_DB / 10)
    found, best = (
        sum(range_noise(statistics, ranges, grid).values())
        for ranges in (built.ranges, scheme_ranges(statistics, whole))
    )
    if found < worth * best:
        return proof
    place = tempfile.TemporaryDirectory(prefix="unclipped-", dir=job.prepared.path.parent)
    with progress.stage("Trying ranges that cut nothing off"), place as folder:
        other = build(job, built.target, whole, Path(folder) / "model.onnx")
        sessions = {FLOAT: open_session(job.prepared.path)}
        for name, artifact in ((INT8, built.artifact), (_PLAIN, other.artifact)):
            sessions[name] = open_session(artifact.proof_model, artifact.proof_settings())
        agreement = evaluate_sessions(sessions, job.validation, reference=FLOAT, count=_SAMPLES).agreement
    clipped, unclipped = agreement[INT8].sqnr_db, agreement[_PLAIN].sqnr_db
    if unclipped < clipped + _WORTH_DB:
        return proof
    return dataclasses.replace(proof, unclipped=(scheme.method, clipped, unclipped))
