"""Hold the figures of each layer's activation, and split its noise into weights, range and inherited noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.agreement import Agreement, OutputAgreement
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.match_activations import ActivationMatch, Kind
from edgeq.util.records import NOT_WRITTEN, plain, write_as
from edgeq.util.records import computed as written_too  # Here, `computed` is the name of a field.

Cause = Literal["weights", "range"]
# If the reference is zero, the ratio of the noise to it is infinite. Ratios of this value or more count as equally bad.
_MOST = 1e4


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
    def added(self) -> float:
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
        layer, inputs, rounding = (noise_ratio(a) for a in (self.layer, self.inputs, self.rounding))
        # The powers of independent errors add up. The part that inputs and rounding do not explain is caused by the
        # weights.
        added = max(0.0, layer - inputs)
        of_range = min(added, rounding)
        return LayerNoise(added - of_range, of_range, max(0.0, noise_ratio(self.accumulated) - added))

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

    def update(
        self, layers: LayerArrays, accumulated: NDArray[Any], real: Callable[[str, NDArray[Any]], NDArray[Any]]
    ) -> None:
        """Add one sample.

        Args:
            accumulated: the activation when the whole quantized model runs.
            real: function that removes the padding from an array of a tensor.
        """
        match, name = self.match, self.match.name
        # Padding of a batch would count as perfect agreement, and nobody reads hidden positions.
        exact = real(name, layers.exact[name])
        self.accumulated.update(exact, match.as_read(real(name, accumulated)))
        self.layer.update(exact, real(name, layers.alone[name]))
        self.inputs.update(exact, real(name, layers.from_rounded[name]))
        # A tensor that stays float is not rounded.
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


def noise_ratio(agreement: OutputAgreement | None) -> float:
    """Return the power of the noise in relation to the signal's. Return 0 without an agreement."""
    if agreement is None:
        return 0.0
    # An output of NaN alone has no level, but it is as bad as any ratio.
    if not agreement.compared or agreement.least_db == math.inf:
        return _MOST if agreement.nonfinite else 0.0
    return float(min(_MOST, 10 ** (-agreement.least_db / 10)))
