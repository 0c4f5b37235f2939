"""Every activation of a quantized model against the float model's, in one pass over the samples with sums only.

Three figures a tensor, because one number cannot tell a culprit from a victim:

    accumulated   the quantized model's tensor when it runs as a whole: all errors so far
    layer         what its layer alone makes of the float model's inputs, in integers: this layer's own error
    rounding      the float tensor quantized with the model's scale and zero point: the error of its range alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.errors import DataError
from edgeq.measure.agreement import OutputAgreement, OutputComparison
from edgeq.measure.graphs import GraphIndex
from edgeq.measure.inference import Session, infer
from edgeq.measure.match_activations import ActivationMatch
from edgeq.measure.observe import cut_layers, given_name, observing_session, only_outputs
from edgeq.measure.quantization import dynamic_quantization
from edgeq.model.sizes import tensor_sizes
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings

if TYPE_CHECKING:
    from edgeq.data.samples import Sample, Samples

Kind = Literal["static", "dynamic", "float"]

MEMORY = 2**29
"""Bytes that fetched tensors may take at once; a model with more is run in several waves."""
# Of each tensor: the float model's, the quantized model's, the layer's alone and one copy in float64.
_COPIES = 5
_FLOAT_TYPES = ("tensor(float)", "tensor(float16)")


@dataclass(frozen=True)
class ActivationComparison:
    """The figures of one activation.

    Attributes:
        name: tensor of the float model; `computed` its tensor in the quantized one.
        node, op_type, folded: as `ActivationMatch` has them.
        kind: "static" or "dynamic" quantization, or "float" where it is not quantized.
        range: smallest and largest number that it can hold; None unless static.
        minimum, maximum: of the float values seen.
        accumulated, layer: see the module. For a graph input both are `rounding`.
        rounding: None where it is not quantized.
        saturated_low, saturated_high: share of the float values that lie outside the range by more than half a step.
    """

    name: str
    node: str
    op_type: str
    folded: str
    computed: str
    kind: Kind
    range: tuple[float, float] | None
    minimum: float
    maximum: float
    accumulated: OutputAgreement
    layer: OutputAgreement
    rounding: OutputAgreement | None
    saturated_low: float
    saturated_high: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; every key is always there."""
        return {
            "name": self.name,
            "node": self.node,
            "op_type": self.op_type,
            "folded": self.folded,
            "quantized_name": self.computed,
            "kind": self.kind,
            "range": list(self.range) if self.range else None,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "accumulated": _figures(self.accumulated),
            "layer": _figures(self.layer),
            "rounding": _figures(self.rounding) if self.rounding else None,
            "saturated": {"low": self.saturated_low, "high": self.saturated_high},
        }


def _figures(agreement: OutputAgreement) -> dict[str, Any]:
    plain = agreement.to_dict()
    return {key: plain[key] for key in ("sqnr_db", "cosine", "max_abs_error", "equal", "nonfinite", "mismatched")}


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
    them: `edgeq.measure.agreement` tells what the optimised one answers. Nothing is kept but sums; tensors that do not
    fit into `memory` together are taken in waves, each over all samples.

    Raises:
        DataError: there are no samples, or a model refuses one.
        RuntimeUnavailableError: the runtime refuses a model.
    """
    settings = settings or SessionSettings()
    first = next(iter(samples), None)
    if first is None:
        raise DataError(f"{samples.source}: no samples to compare the models on", "Point --data at samples")
    waves = list(_waves(float_graph, matches, first, memory))
    done: dict[str, ActivationComparison] = {}
    with progress.stage("Comparing layers", len(samples) * len(waves)) as advance:
        for wave in waves:
            observer = _Observer(float_graph, quantized_graph, matches, wave, settings)
            for sample in samples:
                observer.observe(sample)
                advance(1)
            done.update({found.name: found for found in observer.results()})
    return tuple(done[match.name] for match in matches if match.name in done)


class _Observer:
    """Three sessions and the sums of one wave of tensors."""

    def __init__(
        self,
        float_graph: GraphIndex,
        quantized_graph: GraphIndex,
        matches: Sequence[ActivationMatch],
        wave: Sequence[ActivationMatch],
        settings: SessionSettings,
    ) -> None:
        computed = [match for match in wave if not match.is_input]
        cut = only_outputs(
            cut_layers(quantized_graph, matches), [m.computed for m in computed], inputs=quantized_graph.inputs
        )
        present = {value.name for value in cut.graph.input}
        self._given = [match for match in matches if given_name(match) in present]
        fetched = dict.fromkeys(m.name for m in (*computed, *self._given) if not m.is_input)
        self._float = _session(float_graph, list(fetched), settings)
        kinds = {output.name: output.type for output in self._float.get_outputs()} if self._float else {}
        self._computed = [match for match in computed if kinds[match.name] in _FLOAT_TYPES]
        self._quantized = _session(quantized_graph, [m.computed for m in self._computed], settings)
        self._layers: Session | None = None
        self._half: frozenset[str] = frozenset()
        if self._computed:
            session = observing_session(cut, quantized_graph, optimization="none", settings=settings)
            self._half = frozenset(i.name for i in session.get_inputs() if i.type == "tensor(float16)")
            self._layers = session
        self._tallies = [_Tally(m) for m in wave if m.is_input or m in self._computed]

    def observe(self, sample: Sample) -> None:
        exact = {**sample.inputs, **_run(self._float, sample, "the float model")}
        whole = {**sample.inputs, **_run(self._quantized, sample, "the quantized model")}
        given = {given_name(m): self._typed(given_name(m), exact[m.name]) for m in self._given}
        fed = dataclasses.replace(sample, inputs={**sample.inputs, **given})
        alone = {**sample.inputs, **_run(self._layers, fed, "a layer of the quantized model")}
        real = _real_rows(sample)
        for tally in self._tallies:
            name, computed = tally.match.name, tally.match.computed
            tally.update(real(exact[name]), real(whole[computed]), real(alone[computed]))

    def results(self) -> Iterator[ActivationComparison]:
        return (tally.result() for tally in self._tallies)

    def _typed(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        return values.astype(np.float16 if name in self._half else np.float32, copy=False)


@dataclass
class _Tally:
    match: ActivationMatch
    low: int = 0
    high: int = 0
    elements: int = 0
    minimum: float = np.inf
    maximum: float = -np.inf
    accumulated: OutputComparison = field(init=False)
    layer: OutputComparison = field(init=False)
    rounding: OutputComparison = field(init=False)

    def __post_init__(self) -> None:
        for name in ("accumulated", "layer", "rounding"):
            setattr(self, name, OutputComparison(self.match.name))

    def update(self, exact: NDArray[Any], whole: NDArray[Any], alone: NDArray[Any]) -> None:
        self.accumulated.update(exact, self._as_read(whole))
        self.layer.update(exact, self._as_read(alone))
        self.elements += exact.size
        if exact.size:
            self.minimum = min(self.minimum, float(exact.min()))
            self.maximum = max(self.maximum, float(exact.max()))
        how = self.match.quantization
        if how is not None:
            self.rounding.update(exact, how.round_trip(exact))
            low, high = how.saturated(exact)
            self.low += low
            self.high += high
        elif self.match.dynamic:
            self.rounding.update(exact, dynamic_quantization(exact).round_trip(exact))

    def _as_read(self, values: NDArray[Any]) -> NDArray[Any]:
        """What the tensor's readers get."""
        how = self.match.quantization
        if how is not None and values.dtype.kind in "iu":
            return how.dequantize(values)
        if self.match.dynamic:
            how = dynamic_quantization(values)
        return values if how is None else how.round_trip(values)

    def result(self) -> ActivationComparison:
        match, how = self.match, self.match.quantization
        kind: Kind = "static" if how is not None else "dynamic" if match.dynamic else "float"
        return ActivationComparison(
            name=match.name,
            node=match.node,
            op_type=match.op_type,
            folded=match.folded,
            computed=match.computed,
            kind=kind,
            range=how.range if how is not None else None,
            minimum=self.minimum if self.elements else 0.0,
            maximum=self.maximum if self.elements else 0.0,
            accumulated=self.accumulated.result(),
            layer=self.layer.result(),
            rounding=None if kind == "float" else self.rounding.result(),
            saturated_low=self.low / self.elements if self.elements else 0.0,
            saturated_high=self.high / self.elements if self.elements else 0.0,
        )


def _waves(
    graph: GraphIndex, matches: Sequence[ActivationMatch], first: Sample, memory: int
) -> Iterator[list[ActivationMatch]]:
    """Neighbours together as long as they fit; where a size is unknown, it is taken for that of the largest."""
    sizes = tensor_sizes(graph.model, first.inputs)
    largest = max((sizes[m.name] for m in matches if m.name in sizes), default=0)
    wave: list[ActivationMatch] = []
    used = 0
    for match in matches:
        size = _COPIES * sizes.get(match.name, largest)
        if wave and used + size > memory:
            yield wave
            wave, used = [], 0
        wave.append(match)
        used += size
    if wave:
        yield wave


def _session(graph: GraphIndex, names: Sequence[str], settings: SessionSettings) -> Any:
    """None where there is nothing to ask for."""
    if not names:
        return None
    return observing_session(only_outputs(graph.model, names), graph, optimization="none", settings=settings)


def _run(session: Session | None, sample: Sample, model: str) -> Mapping[str, NDArray[Any]]:
    return infer(session, sample, model=model) if session is not None else {}


def _real_rows(sample: Sample) -> Any:
    """Takes the padding off the arrays of a batch that was gathered and filled up."""
    contexts = sample.context.get("rows")
    size = len(next(iter(sample.inputs.values())))

    def real(array: NDArray[Any]) -> NDArray[Any]:
        return array[: len(contexts)] if contexts is not None and array.ndim and len(array) == size else array

    return real
