"""Layers for the report: a quantized model against its float model, by a few samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeq.data.samples import Samples, Subset
from edgeq.errors import EdgeqError
from edgeq.measure.agreement import compare_sessions
from edgeq.measure.blame import blame
from edgeq.measure.graphs import read_graph
from edgeq.measure.layers import compare_layers
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, open_session

SAMPLES = 4
"""Sums over all elements of a tensor are telling after a few."""
_CULPRITS = 10
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
    """What `edgeq debug` would say of each activation, cut to what the report draws, and the culprits.

    Args:
        float_model: the prepared model that `quantized` was made from.
        settings: of the quantized model's session.

    Returns:
        `activations`, `culprits` and `count`; `error` instead where the two cannot be compared layer by layer.
    """
    few = Subset(samples, range(min(count, len(samples))))
    try:
        reference, candidate = read_graph(float_model), read_graph(quantized)
        found = compare_layers(reference, candidate, few, settings=settings, progress=progress)
        written = replace(settings, optimization="none")
        outputs = compare_sessions(open_session(float_model), open_session(quantized, written), few)
        _, culprits = blame(reference, candidate, found, outputs, few, most=_CULPRITS, settings=settings)
    except EdgeqError as error:
        return {"error": str(error)}
    return {
        "count": found.count,
        "activations": [_cut(activation.to_dict()) for activation in found.activations],
        "culprits": [culprit.to_dict() for culprit in culprits],
    }


def _cut(plain: dict[str, Any]) -> dict[str, Any]:
    figures = {which: {key: plain[which][key] for key in _FIGURES} for which in ("accumulated", "layer")}
    return {**{key: plain[key] for key in _KEPT}, **figures}
