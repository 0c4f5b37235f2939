"""A float model and its quantized form, layer by layer: the interface of the modules match_*, compare_* and effects.

The four operations of ONNX Runtime's `qdq_loss_debug`, for every quantized format and without keeping activations:

    match_weights         which integer weight stands for which float weight (`compare_weights`: how well)
    with_outputs          a model that gives tensors in the middle too
    collect_activations   those tensors, one sample at a time
    match_activations     which tensor stands for which activation (`compare_activations`: how well)

`compare_layers` is all of it; `output_effects` measures what the error of one layer alone does to the outputs.

Every activation of a quantized model against the float model's, in one pass over the samples with sums only.

Three figures a tensor, to distinguish layers that cause errors from layers that inherit them:

    accumulated   the quantized model's tensor when it runs as a whole: all errors so far
    layer         what its layer alone makes of the float model's inputs, in integers: the error where it arises
    rounding      the float tensor quantized with the model's scale and zero point: the error of its range alone

and, to find the cause in a layer, `inputs`: what the float layer makes of quantized inputs. The noise of the
layer that neither these nor the rounding of its result account for is that of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edgeq.data.samples import Samples
from edgeq.errors import DataError
from edgeq.measure.agreement import Agreement
from edgeq.measure.effects import output_effects
from edgeq.measure.error_sources import (
    ActivationComparison,
    ActivationObserver,
    ErrorSource,
    as_read,
    candidates,
    find_error_sources,
)
from edgeq.measure.latency import infer
from edgeq.measure.layer_runs import (
    MEMORY,
    LayerPair,
    LayerRuns,
    collect_activations,
    cut_layers,
    floats_only,
    layer_reads,
    only_outputs,
    partition_layers,
)
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

if TYPE_CHECKING:
    from edgeq.data.records import Sample


def compare_activations(
    float_graph: GraphIndex,
    quantized_graph: GraphIndex,
    matches: Sequence[ActivationMatch],
    samples: Samples,
    *,
    settings: SessionSettings | None = None,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> tuple[ActivationComparison, ...]:
    """Run both models, and the quantized one's layers alone, over the samples.

    The quantized graph runs as it is written, without the runtime's fusions, because looking at a tensor would break
    them: `edgeq.measure.agreement` measures the optimised one. Nothing is kept but sums; tensors that do not
    fit into `memory` together are taken in passes, each over all samples.

    Raises:
        DataError: there are no samples, or a model refuses one.
        RuntimeUnavailableError: the runtime refuses a model.
    """
    settings = settings or SessionSettings()
    first = next(iter(samples), None)
    if first is None:
        raise DataError(f"{samples.source}: no samples to compare the models on", "Point --data at samples")
    matches = floats_only(float_graph, matches, settings)
    pair = LayerPair(float_graph, quantized_graph, matches, settings)
    partitions = list(partition_layers(float_graph, matches, first, memory))
    done: list[ActivationComparison] = []
    with progress.stage("Comparing layers", len(samples) * len(partitions)) as advance:
        for partition in partitions:
            observer = _Observer(pair, partition)
            for sample in samples:
                observer.observe(sample)
                advance(1)
            done.extend(observer.results())
    return tuple(done)


class _Observer:
    """The sessions and the sums of one pass of tensors."""

    def __init__(self, pair: LayerPair, partition: Sequence[ActivationMatch]) -> None:
        self._runs = LayerRuns(pair, partition)
        self._quantized = pair.session(pair.quantized_graph, [m.computed for m in partition if not m.is_input])
        self._observers = []
        for match in partition:
            reads = layer_reads(pair.layers, match, pair.given)
            exact = tuple(name for name in reads if (name, match.node) in pair.exact)
            self._observers.append(ActivationObserver(match, reads, exact))

    def observe(self, sample: Sample) -> None:
        """Add one sample to the sums."""
        found = self._runs.run(sample)
        whole = dict(sample.inputs)
        if self._quantized is not None:
            whole |= infer(self._quantized, sample, model="the quantized model")
        real = _real_rows(sample)
        for observer in self._observers:
            match = observer.match
            seen = as_read(match, real(whole[match.computed]))
            observer.update(
                real(found.exact[match.name]), seen, real(found.alone[match.name]), real(found.from_rounded[match.name])
            )

    def results(self) -> Iterator[ActivationComparison]:
        """The figures of each tensor, in the order of the partition."""
        return (observer.result() for observer in self._observers)


def _real_rows(sample: Sample) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Takes the padding off the arrays of a batch that was gathered and filled up."""
    contexts = sample.context.get("rows")
    size = len(next(iter(sample.inputs.values())))

    def real(array: NDArray[Any]) -> NDArray[Any]:
        return array[: len(contexts)] if contexts is not None and array.ndim and len(array) == size else array

    return real


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
