"""A float model and its quantized form, layer by layer: the interface of the modules match_*, compare_* and effects.

The four operations of ONNX Runtime's `qdq_loss_debug`, for every quantized format and without keeping activations:

    match_weights         which integer weight stands for which float weight (`compare_weights`: how well)
    with_outputs          a model that gives tensors in the middle too
    collect_activations   those tensors, one sample at a time
    match_activations     which tensor stands for which activation (`compare_activations`: how well)

`compare_layers` is all of it; `output_effects` measures what the error of one layer alone does to the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgeq.data.samples import Samples
from edgeq.measure.activation_observer import ActivationComparison
from edgeq.measure.agreement import Agreement
from edgeq.measure.compare_activations import compare_activations
from edgeq.measure.effects import output_effects
from edgeq.measure.error_sources import ErrorSource, candidates, find_error_sources
from edgeq.measure.layer_runs import MEMORY, collect_activations, cut_layers, only_outputs
from edgeq.measure.match_layers import (
    ActivationMatch,
    WeightComparison,
    WeightMatch,
    compare_weights,
    match_activations,
    match_weights,
    weight_values,
)
from edgeq.model.edit import with_outputs
from edgeq.model.graph import GraphIndex
from edgeq.run.session import SessionSettings
from edgeq.util.display import SILENT, Progress

__all__ = [
    "ActivationComparison",
    "ActivationMatch",
    "GraphIndex",
    "LayerComparison",
    "WeightComparison",
    "WeightMatch",
    "collect_activations",
    "compare_activations",
    "compare_layers",
    "compare_weights",
    "cut_layers",
    "match_activations",
    "match_weights",
    "only_outputs",
    "output_effects",
    "weight_values",
    "with_outputs",
]


@dataclass(frozen=True)
class LayerComparison:
    """Weights and activations in the float model's order of execution, over `count` samples."""

    weights: tuple[WeightComparison, ...]
    activations: tuple[ActivationComparison, ...]
    count: int


def compare_layers(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    samples: Samples,
    *,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> LayerComparison:
    """Match and compare all weights and activations of two models.

    Args:
        float_graph: as it was when it was quantized (`edgeq.model.prepare`), so that names and weights are the same.
        samples: inputs of both models.
        settings: threads, providers and configuration; the quantized graph is run as written all the same.
        memory: bytes that fetched tensors may take at once.

    Raises:
        DataError: there are no samples, or a model refuses one.
    """
    weights = compare_weights(float_graph, quantized_graph, match_weights(float_graph, quantized_graph))
    activations = compare_activations(
        float_graph,
        quantized_graph,
        match_activations(float_graph, quantized_graph),
        samples,
        settings=settings,
        memory=memory,
        progress=progress,
    )
    return LayerComparison(weights, activations, len(samples))


# For each error source that may be named, so many tensors are tried,
_CANDIDATES = 4
# each on so many samples: an effect on the outputs shows at once, or is none.
_FOLLOWED = 4


def attribute_error(
    reference: GraphIndex,
    quantized: GraphIndex,
    comparison: LayerComparison,
    outputs: Agreement,
    samples: Samples,
    *,
    most: int = 10,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> tuple[Mapping[str, Agreement], tuple[ErrorSource, ...]]:
    """The effect of each likely layer alone on the outputs, and at most `most` error sources, worst first.

    Args:
        comparison: of the two graphs.
        outputs: agreement of the quantized model's outputs as a whole, on the graph as written.
    """
    effects = output_effects(
        reference,
        quantized,
        match_activations(reference, quantized),
        candidates(comparison.activations, reference.outputs, _CANDIDATES * most),
        samples,
        count=_FOLLOWED,
        settings=settings,
        memory=memory,
        progress=progress,
    )
    return effects, find_error_sources(comparison.activations, comparison.weights, effects, outputs, most)
