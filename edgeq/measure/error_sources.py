"""Find the layers whose weights or range cause the error of the outputs, and the nodes to keep in float.

There are three steps. Each step considers fewer layers, with more effort:

- The figures of all layers show the noise that each layer adds itself.
- Two rankings of this noise give candidates. One ranks layers by the size of their noise, the other by its contribution
  to the outputs' noise.
- For each candidate, edgeq measures the effect of this layer's error alone on the outputs (`LayerPair.output_effects`).
  This effect decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.agreement import Agreement, OutputAgreement, worst_db
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.match_layers import ActivationMatch, Kind, WeightComparison
from edgeq.util.records import NOT_WRITTEN, NullIsInfinite, plain, write_as
from edgeq.util.records import computed as written_too  # Here, `computed` is the name of a field.

Cause = Literal["weights", "range"]
# A layer is an error source if it alone causes at least this share of the noise in the outputs.
_STANDS_OUT = 0.05
# If the reference is zero, the ratio of the noise to it is infinite. Ratios of this value or more count as equally bad.
_MOST = 1e4
# If the ratio is this large or larger, channels are so unequal that a message mentions their shared scale.
_UNEQUAL = 4.0


@dataclass(frozen=True)
class LayerArrays:
    """Hold the tensors of each layer for one sample, by name of the float tensor.

    Attributes:
        exact: the float model's tensor.
        raw: result of the quantized layer on the float model's tensors. It contains floats before they are quantized,
            or integers.
        alone: the same result in the form that readers of the tensor get.
        from_rounded: result of the float layer on the same tensors after these are rounded as in the quantized model.
    """

    exact: Mapping[str, NDArray[Any]]
    raw: Mapping[str, NDArray[Any]]
    alone: Mapping[str, NDArray[Any]]
    from_rounded: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerNoise:
    """Hold the noise in the result of one layer, relative to the power of its signal: 10^(-SQNR/10).

    Attributes:
        weights: noise of the layer's quantized weights.
        range: noise of rounding and clipping the layer's result.
        inherited: noise of all earlier layers, when the whole quantized model runs.
    """

    weights: float
    range: float
    inherited: float

    @property
    def own(self) -> float:
        """Return the noise of the layer itself, without inherited noise."""
        return self.weights + self.range

    @property
    def cause(self) -> Cause:
        """Return the larger part of the layer's own noise, "weights" or "range"."""
        return "weights" if self.weights > self.range else "range"


def _figures(agreement: OutputAgreement) -> dict[str, Any]:
    figures = plain(agreement)
    return {key: figures[key] for key in ("sqnr_db", "cosine", "max_abs_error", "equal", "nonfinite", "mismatched")}


_FIGURES = write_as(form=_figures)


@dataclass(frozen=True)
class ActivationComparison:
    """Hold the figures of one activation.

    Attributes:
        name: name of the tensor in the float model.
        computed: name of the tensor in the quantized model.
        node, op_type, folded, kind, range: see `ActivationMatch`.
        minimum, maximum: smallest and largest float values seen.
        reads: names of the activations that the tensor's layer reads.
        exact_reads: names of the activations in `reads` that the layer reads before they are quantized.
        accumulated, layer, inputs: see `edgeq.measure.layers`. For a graph input, the first two equal `rounding`, and
            the last is exact.
        rounding: agreement of the float values with their rounded form; None if the tensor is not quantized.
        saturated_low, saturated_high: share of the float values that are outside the range by more than half a step.
        effect: agreement of the float model's outputs if only this layer's error is added; None if it was not measured.
    """

    name: str
    node: str
    op_type: str
    folded: str
    computed: str = field(metadata=write_as(name="quantized_name"))
    kind: Kind
    range: tuple[float, float] | None
    minimum: float
    maximum: float
    reads: tuple[str, ...]
    exact_reads: tuple[str, ...]
    accumulated: OutputAgreement = field(metadata=_FIGURES)
    layer: OutputAgreement = field(metadata=_FIGURES)
    inputs: OutputAgreement = field(metadata=_FIGURES)
    rounding: OutputAgreement | None = field(metadata=_FIGURES)
    saturated_low: float = field(metadata=NOT_WRITTEN)
    saturated_high: float = field(metadata=NOT_WRITTEN)
    effect: Agreement | None = field(default=None, metadata=NOT_WRITTEN)

    @written_too
    def saturated(self) -> dict[str, float]:
        """Return the shares of saturated values at the lower and the upper end."""
        return {"low": self.saturated_low, "high": self.saturated_high}

    @written_too
    def noise(self) -> LayerNoise:
        """Return the noise of the layer that computes the activation."""
        layer, inputs, rounding = (_ratio(a) for a in (self.layer, self.inputs, self.rounding))
        # The powers of independent errors add up. The part that inputs and rounding do not explain is caused by the
        # weights.
        own = max(0.0, layer - inputs)
        of_range = min(own, rounding)
        return LayerNoise(own - of_range, of_range, max(0.0, _ratio(self.accumulated) - own))

    @written_too
    def output_sqnr_db(self) -> float | None:
        """Return the SQNR of the float model's outputs if only this layer's error is added. Return None if it was not
        measured.
        """
        return None if self.effect is None else self.effect.sqnr_db


@dataclass
class ActivationSums:
    """Hold sums over samples for one activation."""

    match: ActivationMatch
    reads: tuple[str, ...]
    exact_reads: tuple[str, ...]
    low: int = 0
    high: int = 0
    elements: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf

    def __post_init__(self) -> None:
        name = self.match.name
        self.accumulated, self.layer = OutputComparison(name), OutputComparison(name)
        self.inputs, self.rounding = OutputComparison(name), OutputComparison(name)

    def update(self, made: LayerArrays, whole: NDArray[Any], real: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Add one sample.

        Args:
            whole: the activation when the whole quantized model runs.
            real: function that removes the padding from an array.
        """
        match = self.match
        exact = real(made.exact[match.name])
        self.accumulated.update(exact, match.as_read(real(whole)))
        self.layer.update(exact, real(made.alone[match.name]))
        self.inputs.update(exact, real(made.from_rounded[match.name]))
        if match.kind != "float":
            self.rounding.update(exact, match.as_read(exact))
        self.elements += exact.size
        if exact.size:
            self.minimum = min(self.minimum, float(exact.min()))
            self.maximum = max(self.maximum, float(exact.max()))
        if match.params is not None:
            low, high = match.params.saturated(exact)
            self.low += low
            self.high += high

    def result(self) -> ActivationComparison:
        """Return the figures of all samples so far."""
        match, elements = self.match, max(1, self.elements)
        return ActivationComparison(
            name=match.name,
            node=match.node,
            op_type=match.op_type,
            folded=match.folded,
            computed=match.computed,
            kind=match.kind,
            range=match.range,
            minimum=self.minimum if self.elements else 0.0,
            maximum=self.maximum if self.elements else 0.0,
            reads=self.reads,
            exact_reads=self.exact_reads,
            accumulated=self.accumulated.result(),
            layer=self.layer.result(),
            inputs=self.inputs.result(),
            rounding=None if match.kind == "float" else self.rounding.result(),
            saturated_low=self.low / elements,
            saturated_high=self.high / elements,
        )


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


def candidates(activations: Sequence[ActivationComparison], outputs: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the names of at most `most` tensors whose layers may cause the error, in order of execution.

    Args:
        outputs: names of the graph outputs.
    """
    own = {a.name: a.noise.own for a in activations}
    traced = _traced(activations, own, frozenset(outputs))
    rankings = [sorted((n for n in by if by[n] > 0), key=lambda n: -by[n]) for by in (own, traced)]
    chosen: dict[str, None] = {}
    for pair in itertools.zip_longest(*rankings):
        chosen.update(dict.fromkeys(name for name in pair if name is not None))
    kept = set(itertools.islice(chosen, most))
    return tuple(a.name for a in activations if a.name in kept)


def find_error_sources(
    activations: Sequence[ActivationComparison],
    weights: Sequence[WeightComparison],
    outputs: Agreement,
    most: int = 10,
) -> tuple[ErrorSource, ...]:
    """Return at most `most` layers that each cause a considerable part of the noise in the outputs, the worst first.

    Args:
        outputs: agreement of the whole quantized model's outputs.
    """
    by_name = {a.name: a for a in activations}
    by_node = {w.node: w for w in sorted(weights, key=lambda w: -w.sqnr_db) if len(w.shape) > 1}
    found = []
    for a in activations:
        share = _share(a.effect, outputs) if a.effect is not None else 0.0
        if a.effect is not None and share >= _STANDS_OUT:
            # Gather returns rows of its weight, in the weight's own scale.
            rows = a.op_type == "Gather" and a.node in by_node
            cause: Cause = "weights" if rows else a.noise.cause
            reason = _weight_reason(by_node.get(a.node)) if cause == "weights" else _range_reason(a)
            nodes = [a.node] if cause == "weights" else _touching(a, by_name)
            exclude = tuple(node for node in dict.fromkeys(nodes) if node)
            found.append(ErrorSource(a.name, a.node, a.op_type, worst_db(a.effect), share, cause, reason, exclude))
    return tuple(sorted(found, key=lambda error_source: -error_source.share)[:most])


def sets_to_exclude(
    error_sources: Sequence[ErrorSource], activations: Sequence[ActivationComparison], most: int
) -> tuple[tuple[str, ...], ...]:
    """Return at most `most` sets of nodes to try in float.

    The sets of the error sources come first. Then come the nodes around the tensors whose error changes the outputs
    most.
    """
    by_name = {a.name: a for a in activations}
    followed = [(worst_db(a.effect), a) for a in activations if a.effect is not None]
    worst = (a for _, a in sorted(followed, key=lambda pair: pair[0]))
    touching = (tuple(node for node in dict.fromkeys(_touching(a, by_name)) if node) for a in worst)
    sets = dict.fromkeys((*(source.exclude for source in error_sources), *touching))
    return tuple(itertools.islice(filter(None, sets), most))


def nodes_to_exclude(error_sources: Iterable[ErrorSource]) -> tuple[str, ...]:
    """Return the nodes of all error sources, each once. The nodes of the worst error source come first."""
    return tuple(dict.fromkeys(node for error_source in error_sources for node in error_source.exclude))


def _traced(
    activations: Sequence[ActivationComparison], own: Mapping[str, float], outputs: frozenset[str]
) -> dict[str, float]:
    """Trace the noise of the outputs back to the layers, and return each layer's part.

    The noise that reaches a layer is divided. The layer itself keeps the share that its own noise has in its
    accumulated noise. The rest goes to the tensors that it reads, in proportion to their noise.
    """
    accumulated = {a.name: _ratio(a.accumulated) for a in activations}
    read = {name for a in activations for name in a.reads}
    attributed = {a.name: accumulated[a.name] if a.name in outputs or a.name not in read else 0.0 for a in activations}
    kept = {}
    for a in reversed(activations):
        here = accumulated[a.name]
        sources = {name: accumulated[name] for name in a.reads if accumulated.get(name, 0.0) > 0}
        share = min(1.0, own[a.name] / here) if here > 0 else 0.0
        kept[a.name] = attributed[a.name] * (share if sources else 1.0)
        for name, part in sources.items():
            attributed[name] += (attributed[a.name] - kept[a.name]) * part / sum(sources.values())
    return kept


def _share(effect: Agreement, outputs: Agreement) -> float:
    """Return the layer's share of the noise in an output. If there are several outputs, return the largest share."""
    whole = {output.name: _ratio(output) for output in outputs.outputs}
    parts = [(_ratio(output), whole.get(output.name, 0.0)) for output in effect.outputs]
    return max((min(1.0, part / total) for part, total in parts if total > 0), default=0.0)


def _ratio(agreement: OutputAgreement | None) -> float:
    if agreement is None:
        return 0.0
    if not agreement.compared or agreement.least_db == math.inf:
        return _MOST if agreement.nonfinite else 0.0
    return float(min(_MOST, 10 ** (-agreement.least_db / 10)))


def _touching(tensor: ActivationComparison, activations: Mapping[str, ActivationComparison]) -> list[str]:
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
