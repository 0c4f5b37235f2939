"""Layers for the report: a quantized model against its float model, by a few samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.data.samples import Samples, Subset
from edgeq.errors import EdgeqError
from edgeq.graph.index import GraphIndex
from edgeq.measure.agreement import compare_sessions
from edgeq.measure.error_attribution import attribute_error
from edgeq.measure.layers import compare_layers
from edgeq.model.load import read_model
from edgeq.progress import SILENT, Progress
from edgeq.records import plain
from edgeq.session import SessionSettings, open_session

SAMPLES = 4
"""Sums over all elements of a tensor are telling after a few."""
_ERROR_SOURCES = 10
_KEPT = ("name", "node", "op_type", "kind", "saturated")
_FIGURES = ("sqnr_db", "cosine")


def layer_record(
    float_model: Path,
    quantized: Path,
    samples: Samples,
    settings: SessionSettings,
    *,
    count: int = SAMPLES,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """What `edgeq debug` would say of each activation, cut to what the report draws, and the error sources.

    Args:
        float_model: the prepared model that `quantized` was made from.
        settings: of the quantized model's session.

    Returns:
        `activations`, `error_sources` and `count`; `error` instead where the two cannot be compared layer by layer.
    """
    few = Subset(samples, range(min(count, len(samples))))
    try:
        reference, candidate = (GraphIndex(read_model(path)) for path in (float_model, quantized))
        found = compare_layers(reference, candidate, few, settings=settings, progress=progress)
        written = replace(settings, optimization="none")
        outputs = compare_sessions(open_session(float_model), open_session(quantized, written), few)
        _, error_sources = attribute_error(
            reference, candidate, found, outputs, few, most=_ERROR_SOURCES, settings=settings
        )
    except EdgeqError as error:
        return {"error": str(error)}
    return {
        "count": found.count,
        "activations": [_cut(plain(activation)) for activation in found.activations],
        "culprits": [plain(error_source) for error_source in error_sources],
    }


def _cut(plain: dict[str, Any]) -> dict[str, Any]:
    figures = {which: {key: plain[which][key] for key in _FIGURES} for which in ("accumulated", "layer")}
    return {**{key: plain[key] for key in _KEPT}, **figures}
