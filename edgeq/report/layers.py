"""Layers for the report: a quantized model against its float model, by a few samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.data.samples import Samples, Subset
from edgeq.errors import EdgeqError
from edgeq.graph.index import GraphIndex
from edgeq.measure.comparison import compare_sessions
from edgeq.measure.error_attribution import attribute_error
from edgeq.measure.error_sources import ErrorSource
from edgeq.measure.layers import compare_layers
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.progress import SILENT, Progress
from edgeq.records import Finite, Share, parse, plain
from edgeq.session import SessionSettings, open_session

SAMPLES = 4
"""Sums over all elements of a tensor are telling after a few."""
# Of a model with more multiply-accumulates than these half as many: its tensors have many elements, and to follow
# errors of 40 layers takes 40 float runs a sample.
_LARGE_MACS = 1_000_000_000
_ERROR_SOURCES = 10


@dataclass(frozen=True)
class Figures:
    """How an activation follows the float model's. `sqnr_db` is None where both are equal."""

    sqnr_db: Finite | None = None
    cosine: Finite | None = None


@dataclass(frozen=True)
class Saturated:
    """Shares of values at the two ends of the integer range."""

    low: Share = 0.0
    high: Share = 0.0


@dataclass(frozen=True)
class Activation:
    """What the report draws of one activation; see `edgeq.measure.activation_observer.ActivationComparison`."""

    name: str
    node: str = ""
    op_type: str = ""
    kind: str = ""
    saturated: Saturated | None = None
    accumulated: Figures = Figures()
    layer: Figures = Figures()


@dataclass(frozen=True)
class LayersRecord:
    """Activations in execution order and the layers that cost accuracy, or why there are none."""

    count: int = 0
    activations: tuple[Activation, ...] = ()
    culprits: tuple[ErrorSource, ...] = ()
    error: str = ""


def layer_record(
    float_model: Path,
    quantized: Path,
    samples: Samples,
    settings: SessionSettings,
    *,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """What `edgeq debug` would say of each activation, cut to what the report draws, and the error sources.

    Args:
        float_model: the prepared model that `quantized` was made from.
        settings: of the quantized model's session.

    Returns:
        `activations`, `error_sources` and `count`; `error` instead where the two cannot be compared layer by layer.
    """
    try:
        reference, candidate = (GraphIndex(read_model(path)) for path in (float_model, quantized))
        large = sum(node_macs(reference.model).values()) > _LARGE_MACS
        few = Subset(samples, range(min(SAMPLES // 2 if large else SAMPLES, len(samples))))
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
        "activations": [plain(parse(plain(a), Activation, "the comparison of layers")) for a in found.activations],
        "culprits": plain(error_sources),
    }
