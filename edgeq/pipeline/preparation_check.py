"""Whether the prepared model computes what its source computes: everything after it is measured against the former."""

from __future__ import annotations

from dataclasses import replace

from edgeq.data.samples import Samples
from edgeq.errors import DataError, RuntimeUnavailableError
from edgeq.graph.index import RANDOM
from edgeq.graph.query import every_node
from edgeq.measure.comparison import compare_sessions
from edgeq.model.prepare import PreparedModel
from edgeq.pipeline.other_sizes import check_other_sizes
from edgeq.session import SessionSettings, open_session

LEAST_DB = 30.0
"""Sources of 16-bit floats round otherwise than their float32 form, mostly by 40 to 60 dB."""
_SAMPLES = 8
"""Looked at where the first one's outputs differ."""
_FAR_DB = 10.0
"""Below what the source's own roundings bring, from one optimisation level of onnxruntime to another."""


def check_preparation(prepared: PreparedModel, samples: Samples) -> PreparedModel:
    """`prepared`, with a note where its outputs for the first samples are others than its source's.

    Nothing is noted where the two cannot be compared: a model with random operators, one that onnxruntime runs only as
    it was prepared, or one whose roundings decide what it gives, as where a detector finds nothing and gives 1e-9.

    Raises:
        CheckFailedError: they differ at another size that the source takes, see `check_other_sizes`.
    """
    if any(node.op_type in RANDOM for node in every_node(prepared.model)):
        return prepared
    try:
        source, made = open_session(prepared.source), open_session(prepared.path)
        agreement = compare_sessions(source, made, samples, count=1)
        if not agreement.compared or agreement.same is not None or agreement.sqnr_db >= LEAST_DB:
            check_other_sizes(
                prepared,
                (source, made),
                samples,
                takes=prepared.signature,
                form="its prepared form",
                sqnr_db=agreement.sqnr_db,
                least=LEAST_DB,
            )
            return prepared
        agreement = compare_sessions(source, made, samples, count=_SAMPLES)
        plain = open_session(prepared.source, SessionSettings(optimization="none"))
        rounded = compare_sessions(source, plain, samples, count=_SAMPLES)
    except (RuntimeUnavailableError, DataError):
        return prepared
    if agreement.sqnr_db >= min(LEAST_DB, rounded.sqnr_db - _FAR_DB):
        return prepared
    note = (
        f"its preparation changed what the model computes: {agreement.sqnr_db:.1f} dB SQNR against {prepared.source} "
        "on the first samples, and what follows is measured against the prepared model; please report this model"
    )
    return replace(prepared, notes=(*prepared.notes, note))
