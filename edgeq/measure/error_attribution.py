"""From compared layers to error sources: disturb the likely ones one at a time and see what the outputs make of it."""

from __future__ import annotations

from collections.abc import Mapping

from edgeq.data.samples import Samples
from edgeq.graph.index import GraphIndex
from edgeq.measure.agreement import Agreement
from edgeq.measure.effects import output_effects
from edgeq.measure.error_sources import ErrorSource, candidates, find_error_sources
from edgeq.measure.layer_runs import MEMORY
from edgeq.measure.layers import LayerComparison
from edgeq.measure.match_activations import match_activations
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings

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
