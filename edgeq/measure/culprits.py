"""Which layers add the noise, what in them does, and which nodes to keep in float for it.

Noise is counted relative to the layer's signal (10^(-SQNR/10)), because that is what passes on from layer to layer.
A layer's own noise is that of its weights and of the rounding of its result. Noise that quantized inputs cause is
charged to the tensors that are rounded, except for what the layer makes of it beyond that: a convolution that sums large
values into a small result suffers more from their coarse steps than they do themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgeq.measure.activation_tally import ActivationComparison
from edgeq.measure.agreement import OutputAgreement
from edgeq.measure.match_activations import INPUT
from edgeq.measure.match_weights import WeightComparison

Cause = Literal["weights", "range", "inputs"]

# Noise that many times (6 dB) that of the middle layer stands out; less is how layers differ anyway.
_STANDS_OUT = 4.0
# 40 dB: about what the rounding of eight bits costs by itself.
_HARMLESS = 1e-4
# A tensor of zeros that is not met has no ratio; anything this large is as bad.
_MOST = 1e4
# From here on, channels are so unequal that sharing one scale is worth mentioning.
_UNEQUAL = 4.0


@dataclass(frozen=True)
class LayerNoise:
    """Noise that one layer adds, each relative to its signal's power.

    Attributes:
        weights: of its quantized weights.
        range: of rounding and clipping its result.
        inputs: what it makes of rounded inputs beyond their own noise.
    """

    activation: ActivationComparison
    weights: float
    range: float
    inputs: float

    @property
    def total(self) -> float:
        return self.weights + self.range + self.inputs

    @property
    def cause(self) -> Cause:
        """The largest part."""
        parts: dict[Cause, float] = {"weights": self.weights, "range": self.range, "inputs": self.inputs}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Culprit:
    """A layer whose noise stands out.

    Attributes:
        name: its tensor.
        node, op_type: what computes it.
        share: of the noise that all layers add, 0 to 1.
        cause: "weights", "range" (of its result) or "inputs" (their steps are too coarse for this layer).
        reason: the cause in figures, one sentence.
        exclude: nodes to keep in float. A tensor stays float only if neither its maker nor any reader is quantized, so
            for a range these are several.
    """

    name: str
    node: str
    op_type: str
    layer_sqnr_db: float
    share: float
    cause: Cause
    reason: str
    exclude: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "node": self.node,
            "op_type": self.op_type,
            "layer_sqnr_db": self.layer_sqnr_db if math.isfinite(self.layer_sqnr_db) else None,
            "share": self.share,
            "cause": self.cause,
            "reason": self.reason,
            "exclude": list(self.exclude),
        }


def layer_noise(activations: Sequence[ActivationComparison]) -> tuple[LayerNoise, ...]:
    """The noise of every layer, in the same order."""
    rounded = {a.name: _ratio(a.rounding) for a in activations}
    return tuple(_noise(a, max((rounded.get(name, 0.0) for name in a.reads), default=0.0)) for a in activations)


def find_culprits(
    activations: Sequence[ActivationComparison], weights: Sequence[WeightComparison], most: int = 10
) -> tuple[Culprit, ...]:
    """At most `most` layers that add far more noise than the middle one, worst first; none where all are alike."""
    noise = [n for n in layer_noise(activations) if n.total > 0]
    if not noise:
        return ()
    whole = sum(n.total for n in noise)
    bar = max(_STANDS_OUT * statistics.median(n.total for n in noise), _HARMLESS)
    found = sorted((n for n in noise if n.total >= bar), key=lambda n: -n.total)[:most]
    by_name = {a.name: a for a in activations}
    by_node = {w.node: w for w in sorted(weights, key=lambda w: -w.sqnr_db) if len(w.shape) > 1}
    return tuple(_culprit(n, n.total / whole, by_name, by_node.get(n.activation.node)) for n in found)


def nodes_to_exclude(culprits: Iterable[Culprit]) -> tuple[str, ...]:
    """All nodes that the culprits name, worst culprit first, each once."""
    return tuple(dict.fromkeys(node for culprit in culprits for node in culprit.exclude))


def _noise(activation: ActivationComparison, rounded_inputs: float) -> LayerNoise:
    layer, inputs, rounding = (_ratio(a) for a in (activation.layer, activation.inputs, activation.rounding))
    if activation.op_type == INPUT:
        return LayerNoise(activation, 0.0, layer, 0.0)
    # Independent errors add up in power; what is not explained by inputs and rounding is the weights'.
    own = max(0.0, layer - inputs)
    of_range = min(own, rounding)
    return LayerNoise(activation, own - of_range, of_range, max(0.0, inputs - rounded_inputs))


def _ratio(agreement: OutputAgreement | None) -> float:
    if agreement is None or agreement.sqnr_db == math.inf:
        return 0.0
    return float(min(_MOST, 10 ** (-agreement.sqnr_db / 10)))


def _culprit(
    noise: LayerNoise, share: float, activations: Mapping[str, ActivationComparison], weight: WeightComparison | None
) -> Culprit:
    a = noise.activation
    if noise.cause == "weights":
        reason, nodes = _weight_reason(weight), [a.node]
    elif noise.cause == "range":
        reason, nodes = _range_reason(a), _touching(a, activations)
    else:
        # The input with the coarsest steps for what it holds.
        source = max((activations[r] for r in a.reads if r in activations), key=lambda r: _ratio(r.rounding))
        reason = f"its input {source.name} is too coarse for it: {_range_reason(source)}"
        nodes = [a.node, *_touching(source, activations)]
    exclude = tuple(node for node in dict.fromkeys(nodes) if node)
    return Culprit(a.name, a.node, a.op_type, a.layer.sqnr_db, share, noise.cause, reason, exclude)


def _touching(tensor: ActivationComparison, activations: Mapping[str, ActivationComparison]) -> list[str]:
    """Nodes because of which a tensor is quantized. A dynamic scale belongs to the readers alone."""
    readers = [a.node for a in activations.values() if tensor.name in a.reads]
    return readers if tensor.kind == "dynamic" else [tensor.node, *readers]


def _weight_reason(weight: WeightComparison | None) -> str:
    if weight is None:
        return "its weights"
    text = f"{weight.name} has {weight.sqnr_db:.1f} dB"
    if weight.worst_channels and weight.worst_channels[0][1] < weight.sqnr_db:
        channel, db = weight.worst_channels[0]
        text += f", channel {channel} {db:.1f} dB"
    if not weight.per_channel and weight.range_ratio is not None and weight.range_ratio >= _UNEQUAL:
        text += f"; one scale for channels whose largest range is {weight.range_ratio:.0f} times the middle one's"
    return text


def _range_reason(tensor: ActivationComparison) -> str:
    if tensor.range is None:
        return f"values {tensor.minimum:.4g} to {tensor.maximum:.4g} in 8 bits"
    low, high = tensor.range
    text = f"range {low:.4g} to {high:.4g}"
    clipped = tensor.saturated_low + tensor.saturated_high
    return text + (f", {clipped:.2%} of the values outside" if clipped > 0 else "")
