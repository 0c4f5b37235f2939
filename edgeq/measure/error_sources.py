"""Find the layers whose weights or range cause the error of the outputs, and the nodes to keep in float.

There are two steps. The second considers fewer layers, with more effort:

- Gradients predict the noise that the error of each layer causes at the outputs (`LayerPair.output_noise`).
- For the noisiest layers, edgeq measures the effect of this layer's error alone on the outputs
  (`LayerPair.output_effects`). This effect decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgeq.measure.agreement import Agreement, worst_db
from edgeq.measure.layer_noise import ActivationComparison, Cause, noise_ratio
from edgeq.measure.match_weights import WeightComparison
from edgeq.util.records import NullIsInfinite

# A layer is an error source if it alone causes at least this share of the noise in the outputs.
_STANDS_OUT = 0.05
# If the ratio is this large or larger, channels are so unequal that a message mentions their shared scale.
_UNEQUAL = 4.0


@dataclass(frozen=True)
class ErrorSource:
    """Describe a layer that causes a large part of the error of the outputs.

    Attributes:
        name: name of the layer's tensor.
        node, op_type: the node that computes the tensor; "" and "Input" for a graph input.
        output_sqnr_db: SQNR of the float model's outputs if only this layer's error is added.
        share: share of the noise in the quantized model's outputs, 0 to 1. The shares of all layers need not add up to
            1, because errors do not simply add up.
        cause: "weights", or "range" (the range of the layer's result).
        reason: the cause in figures.
        exclude: nodes to keep in float. If the cause is the range, there are several, because a tensor stays in float
            only if the node that computes it and all nodes that read it stay in float.
    """

    name: str
    node: str
    op_type: str
    output_sqnr_db: NullIsInfinite
    share: float
    cause: Cause
    reason: str
    exclude: tuple[str, ...]


def find_error_sources(
    activations: Sequence[ActivationComparison],
    weights: Sequence[WeightComparison],
    outputs: Agreement,
    limit: int = 10,
) -> tuple[ErrorSource, ...]:
    """Return at most `limit` layers that each cause a considerable part of the noise in the outputs, the worst first.

    Args:
        outputs: agreement of the whole quantized model's outputs.
    """
    by_name = {a.name: a for a in activations}
    # Of several weights of a node, the dict keeps the last one, which is the worst. Vectors are biases.
    by_node = {w.node: w for w in sorted(weights, key=lambda w: -w.sqnr_db) if len(w.shape) > 1}
    sources = []
    for a in activations:
        share = _noise_share(a.effect, outputs) if a.effect is not None else 0.0
        if a.effect is not None and share >= _STANDS_OUT:
            # Gather returns rows of its weight, in the weight's own scale.
            rows = a.op_type == "Gather" and a.node in by_node
            cause: Cause = "weights" if rows else a.noise.cause
            reason = _weight_reason(by_node.get(a.node)) if cause == "weights" else _range_reason(a)
            nodes = [a.node] if cause == "weights" else _find_touching(a, by_name)
            exclude = tuple(node for node in dict.fromkeys(nodes) if node)
            sources.append(ErrorSource(a.name, a.node, a.op_type, worst_db(a.effect), share, cause, reason, exclude))
    return tuple(sorted(sources, key=lambda error_source: -error_source.share)[:limit])


def list_node_sets(
    error_sources: Sequence[ErrorSource], activations: Sequence[ActivationComparison], limit: int
) -> tuple[tuple[str, ...], ...]:
    """Return at most `limit` sets of nodes to try in float.

    The sets of the error sources come first. Then come the nodes around the tensors whose error changes the outputs
    most.
    """
    by_name = {a.name: a for a in activations}
    followed = [(worst_db(a.effect), a) for a in activations if a.effect is not None]
    worst = (a for _, a in sorted(followed, key=lambda pair: pair[0]))
    touching = (tuple(node for node in dict.fromkeys(_find_touching(a, by_name)) if node) for a in worst)
    sets = dict.fromkeys((*(source.exclude for source in error_sources), *touching))
    return tuple(itertools.islice(filter(None, sets), limit))


def list_excluded_nodes(error_sources: Iterable[ErrorSource]) -> tuple[str, ...]:
    """Return the nodes of all error sources, each once. The nodes of the worst error source come first."""
    return tuple(dict.fromkeys(node for error_source in error_sources for node in error_source.exclude))


def _noise_share(effect: Agreement, outputs: Agreement) -> float:
    """Return the layer's share of the noise in an output. If there are several outputs, return the largest share."""
    output_noise = {output.name: noise_ratio(output) for output in outputs.outputs}
    parts = [(noise_ratio(output), output_noise.get(output.name, 0.0)) for output in effect.outputs]
    return max((min(1.0, part / total) for part, total in parts if total > 0), default=0.0)


def _find_touching(tensor: ActivationComparison, activations: Mapping[str, ActivationComparison]) -> list[str]:
    """Return the nodes that cause a tensor to be quantized. If the scale is dynamic, these are only the nodes that read
    the tensor.
    """
    readers = [a.node for a in activations.values() if tensor.name in a.reads and tensor.name not in a.exact_reads]
    return readers if tensor.kind == "dynamic" else [tensor.node, *readers]


def _weight_reason(weight: WeightComparison | None) -> str:
    if weight is None:
        return "its weights"
    text = f"{weight.name} has {weight.sqnr_db:.1f} dB"
    if weight.worst_channels and weight.worst_channels[0][1] < weight.sqnr_db:
        channel, db = weight.worst_channels[0]
        text += f", channel {channel} {db:.1f} dB"
    if not weight.per_channel and weight.range_ratio is not None and weight.range_ratio >= _UNEQUAL:
        text += f"; one scale for all channels, whose largest range is {weight.range_ratio:.0f} times the median"
    return text


def _range_reason(tensor: ActivationComparison) -> str:
    if tensor.range is None:
        return f"values {tensor.minimum:.4g} to {tensor.maximum:.4g} in 8 bits"
    low, high = tensor.range
    rounding = "" if tensor.rounding is None else f", {tensor.rounding.sqnr_db:.1f} dB by rounding alone"
    clipped = tensor.saturated_low + tensor.saturated_high
    outside = f", {clipped:.2%} of the values outside" if clipped >= 0.0001 else ""
    return f"{tensor.name} {low:.4g} to {high:.4g}{rounding}{outside}"
