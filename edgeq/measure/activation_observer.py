"""The figures of one activation, and the sums that they are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.measure.agreement import OutputAgreement
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.match_layers import ActivationMatch
from edgeq.model.quant_params import dynamic_params
from edgeq.util.records import NOT_WRITTEN, plain, written
from edgeq.util.records import computed as written_too  # `computed` is a field here

Kind = Literal["static", "dynamic", "float"]


def _figures(agreement: OutputAgreement) -> dict[str, Any]:
    figures = plain(agreement)
    return {key: figures[key] for key in ("sqnr_db", "cosine", "max_abs_error", "equal", "nonfinite", "mismatched")}


_FIGURES = written(form=_figures)


@dataclass(frozen=True)
class ActivationComparison:
    """The figures of one activation.

    Attributes:
        name: tensor of the float model; `computed` its tensor in the quantized one.
        node, op_type, folded: as `ActivationMatch` has them.
        kind: "static" or "dynamic" quantization, or "float" where it is not quantized.
        range: smallest and largest number that it can hold; None unless static.
        minimum, maximum: of the float values seen.
        reads: names of the activations that its layer reads; exact_reads: those of them that it reads before they are
            quantized.
        accumulated, layer, inputs: see `compare_activations`. For a graph input the first two are `rounding`, and the
            last is exact.
        rounding: None where it is not quantized.
        saturated_low, saturated_high: share of the float values that lie outside the range by more than half a step.
    """

    name: str
    node: str
    op_type: str
    folded: str
    computed: str = field(metadata=written(name="quantized_name"))
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

    @written_too
    def saturated(self) -> dict[str, float]:
        """The shares at the two ends."""
        return {"low": self.saturated_low, "high": self.saturated_high}


@dataclass
class ActivationObserver:
    """Sums over samples for one activation."""

    match: ActivationMatch
    reads: tuple[str, ...]
    exact_reads: tuple[str, ...]
    low: int = 0
    high: int = 0
    elements: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf
    accumulated: OutputComparison = field(init=False)
    layer: OutputComparison = field(init=False)
    inputs: OutputComparison = field(init=False)
    rounding: OutputComparison = field(init=False)

    def __post_init__(self) -> None:
        for name in ("accumulated", "layer", "inputs", "rounding"):
            setattr(self, name, OutputComparison(self.match.name))

    def update(self, exact: NDArray[Any], whole: NDArray[Any], alone: NDArray[Any], from_rounded: NDArray[Any]) -> None:
        """Add one sample: the float tensor; the quantized model's and its layer's alone, as their readers get them; and
        what the float layer makes of rounded inputs."""
        match = self.match
        self.accumulated.update(exact, whole)
        self.layer.update(exact, alone)
        self.inputs.update(exact, from_rounded)
        if match.params is not None or match.dynamic:
            self.rounding.update(exact, as_read(match, exact))
        self.elements += exact.size
        if exact.size:
            self.minimum = min(self.minimum, float(exact.min()))
            self.maximum = max(self.maximum, float(exact.max()))
        if match.params is not None:
            low, high = match.params.saturated(exact)
            self.low += low
            self.high += high

    def result(self) -> ActivationComparison:
        """The figures of all samples so far."""
        match, params = self.match, self.match.params
        kind: Kind = "static" if params is not None else "dynamic" if match.dynamic else "float"
        return ActivationComparison(
            name=match.name,
            node=match.node,
            op_type=match.op_type,
            folded=match.folded,
            computed=match.computed,
            kind=kind,
            range=params.range if params is not None else None,
            minimum=self.minimum if self.elements else 0.0,
            maximum=self.maximum if self.elements else 0.0,
            reads=self.reads,
            exact_reads=self.exact_reads,
            accumulated=self.accumulated.result(),
            layer=self.layer.result(),
            inputs=self.inputs.result(),
            rounding=None if kind == "float" else self.rounding.result(),
            saturated_low=self.low / self.elements if self.elements else 0.0,
            saturated_high=self.high / self.elements if self.elements else 0.0,
        )


def as_read(match: ActivationMatch, values: NDArray[Any]) -> NDArray[Any]:
    """What the readers of a tensor get in the quantized model, where `values` are what its layer gives."""
    params = match.params
    if params is not None and values.dtype.kind in "iu":
        return params.dequantize(values)
    if match.dynamic:
        params = dynamic_params(values)
    return values if params is None else params.fake_quant(values)
