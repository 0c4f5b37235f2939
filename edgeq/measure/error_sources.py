"""Which layers cause the error of the outputs, by their weights or their range, and which nodes to keep in float.

In three steps, each on less and with more effort. The figures of all layers give the noise that each adds itself. Two
rankings of it, by its size and by the share of the outputs' noise that can be traced back to it, give candidates. What
the error of each candidate alone does to the outputs (`edgeq.measure.effects`) decides.

How much a loss depends on which samples it was measured on: the standard error of the difference of two models.

Where the metric is a mean of scores, that is the standard error of the mean of their differences. Any other (mAP, AUC,
F1, a correlation) is computed anew over many random halves of the samples, the same ones for both models, so that what
is hard for both cancels. In such a half a sample counts with probability one half, that is with weight 0 or 2: weights
of mean and variance 1, under which the deviations from the whole follow its sampling distribution as they do under the
bootstrap's (A. Owen, D. Eckles: Bootstrapping data arrays of arbitrary order, 2012, "double-or-nothing"). No
sample counts twice, so a meter that refuses to see one again, and one that counts ties, is served as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeq.data.records import Sample
from edgeq.errors import DataError
from edgeq.measure.agreement import Agreement, OutputAgreement, worst_db
from edgeq.measure.comparison import OutputComparison
from edgeq.measure.latency import Outputs
from edgeq.measure.match_layers import ActivationMatch, WeightComparison
from edgeq.measure.task import Meter, Task
from edgeq.model.quant_params import dynamic_params
from edgeq.util.records import NOT_WRITTEN, NullIsInfinite, plain, written
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


Cause = Literal["weights", "range"]

# A layer that alone gives this share of the noise in the outputs is worth looking at.
_STANDS_OUT = 0.05
# A tensor of zeros that is not met has no ratio; anything this large is as bad.
_MOST = 1e4
# From here on, channels are so unequal that sharing one scale is worth mentioning.
_UNEQUAL = 4.0


@dataclass(frozen=True)
class LayerNoise:
    """Noise that one layer adds itself, relative to its signal's power: 10^(-SQNR/10).

    Attributes:
        name: its tensor.
        weights: of its quantized weights.
        range: of rounding and clipping its result.
        inherited: of everything before it, as the quantized model runs as a whole.
    """

    name: str = field(metadata=NOT_WRITTEN)
    weights: float
    range: float
    inherited: float

    @property
    def own(self) -> float:
        """Of the layer itself, whatever it inherits."""
        return self.weights + self.range

    @property
    def cause(self) -> Cause:
        """The larger part."""
        return "weights" if self.weights > self.range else "range"


@dataclass(frozen=True)
class ErrorSource:
    """A layer that causes a large part of the error of the outputs.

    Attributes:
        name: its tensor.
        node, op_type: what computes it; "" and "Input" for a graph input.
        output_sqnr_db: of the float model's outputs with this layer's error and no other.
        share: of the noise in the quantized model's outputs, 0 to 1; errors do not simply add up, nor do shares.
        cause: "weights" or "range" (of its result).
        reason: the cause in figures.
        exclude: nodes to keep in float. A tensor stays float only if neither its maker nor any reader is quantized, so
            for a range these are several.
    """

    name: str
    node: str
    op_type: str
    output_sqnr_db: NullIsInfinite
    share: float
    cause: Cause
    reason: str
    exclude: tuple[str, ...]


def layer_noise(activations: Sequence[ActivationComparison]) -> tuple[LayerNoise, ...]:
    """The noise of every layer, in the same order."""
    return tuple(_noise(activation) for activation in activations)


def candidates(activations: Sequence[ActivationComparison], outputs: Iterable[str], most: int) -> tuple[str, ...]:
    """Names of up to `most` tensors whose layers may cause the error, in order of execution.

    Args:
        outputs: the graph outputs.
    """
    noise = {n.name: n for n in layer_noise(activations)}
    traced = _traced(activations, noise, frozenset(outputs))
    rankings = [
        sorted((n for n in noise if noise[n].own > 0), key=lambda n: -noise[n].own),
        sorted((n for n in noise if traced[n] > 0), key=lambda n: -traced[n]),
    ]
    chosen: dict[str, None] = {}
    for pair in itertools.zip_longest(*rankings):
        chosen.update(dict.fromkeys(name for name in pair if name is not None))
    kept = set(itertools.islice(chosen, most))
    return tuple(a.name for a in activations if a.name in kept)


def find_error_sources(
    activations: Sequence[ActivationComparison],
    weights: Sequence[WeightComparison],
    effects: Mapping[str, Agreement],
    outputs: Agreement,
    most: int = 10,
) -> tuple[ErrorSource, ...]:
    """At most `most` layers each of which gives a good part of the noise in the outputs, worst first.

    Args:
        effects: as `output_effects` gives them.
        outputs: of the quantized model as a whole.
    """
    by_name = {a.name: a for a in activations}
    noise = {n.name: n for n in layer_noise(activations)}
    by_node = {w.node: w for w in sorted(weights, key=lambda w: -w.sqnr_db) if len(w.shape) > 1}
    found = []
    for name, effect in effects.items():
        share = _share(effect, outputs)
        if share >= _STANDS_OUT:
            a = by_name[name]
            # What Gather gives is rows of its weight, in the weight's own scale.
            rows = a.op_type == "Gather" and a.node in by_node
            cause: Cause = "weights" if rows else noise[name].cause
            reason = _weight_reason(by_node.get(a.node)) if cause == "weights" else _range_reason(a)
            nodes = [a.node] if cause == "weights" else _touching(a, by_name)
            exclude = tuple(node for node in dict.fromkeys(nodes) if node)
            found.append(ErrorSource(a.name, a.node, a.op_type, worst_db(effect), share, cause, reason, exclude))
    return tuple(sorted(found, key=lambda error_source: -error_source.share)[:most])


def sets_to_exclude(
    error_sources: Sequence[ErrorSource],
    activations: Sequence[ActivationComparison],
    effects: Mapping[str, Agreement],
    most: int,
) -> tuple[tuple[str, ...], ...]:
    """Return sets of nodes to try in float: those of the error sources first, then what touches the tensors whose error
    changes the outputs most, until there are `most`."""
    by_name = {a.name: a for a in activations}
    worst = sorted(effects, key=lambda name: worst_db(effects[name]))
    touching = (tuple(node for node in dict.fromkeys(_touching(by_name[name], by_name)) if node) for name in worst)
    sets = dict.fromkeys((*(source.exclude for source in error_sources), *touching))
    return tuple(itertools.islice(filter(None, sets), most))


def nodes_to_exclude(error_sources: Iterable[ErrorSource]) -> tuple[str, ...]:
    """All nodes that the error sources name, worst error source first, each once."""
    return tuple(dict.fromkeys(node for error_source in error_sources for node in error_source.exclude))


def _noise(activation: ActivationComparison) -> LayerNoise:
    layer, inputs, rounding = (_ratio(a) for a in (activation.layer, activation.inputs, activation.rounding))
    # Independent errors add up in power; what neither inputs nor rounding explain is the weights'.
    own = max(0.0, layer - inputs)
    of_range = min(own, rounding)
    inherited = max(0.0, _ratio(activation.accumulated) - own)
    return LayerNoise(activation.name, own - of_range, of_range, inherited)


def _traced(
    activations: Sequence[ActivationComparison], noise: Mapping[str, LayerNoise], outputs: frozenset[str]
) -> dict[str, float]:
    """The outputs' noise traced back: a layer keeps the share of its accumulated noise that is its own; the
    rest is attributed to the tensors it reads, in proportion to theirs."""
    accumulated = {a.name: _ratio(a.accumulated) for a in activations}
    read = {name for a in activations for name in a.reads}
    attributed = {a.name: accumulated[a.name] if a.name in outputs or a.name not in read else 0.0 for a in activations}
    kept = {}
    for a in reversed(activations):
        here = accumulated[a.name]
        sources = {name: accumulated[name] for name in a.reads if accumulated.get(name, 0.0) > 0}
        own = min(1.0, noise[a.name].own / here) if here > 0 else 0.0
        kept[a.name] = attributed[a.name] * (own if sources else 1.0)
        for name, part in sources.items():
            attributed[name] += (attributed[a.name] - kept[a.name]) * part / sum(sources.values())
    return kept


def _share(effect: Agreement, outputs: Agreement) -> float:
    """Of the noise in the output with the largest share."""
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
    """Nodes because of which a tensor is quantized. A dynamic scale belongs to the readers alone."""
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
        text += f"; one scale for channels whose largest range is {weight.range_ratio:.0f} times the middle one's"
    return text


def _range_reason(tensor: ActivationComparison) -> str:
    if tensor.range is None:
        return f"values {tensor.minimum:.4g} to {tensor.maximum:.4g} in 8 bits"
    low, high = tensor.range
    rounding = "" if tensor.rounding is None else f", {tensor.rounding.sqnr_db:.1f} dB by rounding alone"
    clipped = tensor.saturated_low + tensor.saturated_high
    outside = f", {clipped:.2%} of the values outside" if clipped >= 0.0001 else ""
    return f"{tensor.name} {low:.4g} to {high:.4g}{rounding}{outside}"


HALVES = 100
METERED = 32
"""Halves where a meter cannot compute them itself, and a meter is kept for each."""
_FEWEST_HALVES = 8


@dataclass(frozen=True)
class Measured:
    """One model's metrics over some rows, and how its primary metric spreads.

    Attributes:
        scores: of each row, their mean being the primary metric; None where the task has none.
        halves: the primary metric over each half; NaN where it has none (AUC of one class). Empty with `scores`.
    """

    metrics: Mapping[str, float]
    scores: NDArray[np.float64] | None = None
    halves: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class ResampledMeter:
    """One model's metrics over the rows so far, with what it takes to find their doubt. Argument: the task.

    Of a task's meter it uses, where it has them, `scores()` and `resampled(halves)` (see `edgeq.measure.task.Meter`);
    else it keeps a meter for each half, which costs `METERED` / 2 updates a row.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole = task.start()
        alone = hasattr(self._whole, "scores") or hasattr(self._whole, "resampled")
        self._halves: list[Meter] = [] if alone else [task.start() for _ in range(METERED)]
        self._random = np.random.default_rng(0)
        self._members = np.zeros(METERED, np.int64)
        self.rows = 0

    def update(self, outputs: Outputs, sample: Sample) -> None:
        """Add one row: a model's outputs, and the sample with its label."""
        self._whole.update(outputs, sample)
        self.rows += 1
        if self._halves:
            for half in np.flatnonzero(self._random.random(METERED) < 0.5):
                self._halves[half].update(outputs, sample)
                self._members[half] += 1

    def measured(self) -> Measured:
        """So far."""
        metrics = dict(self._whole.result())
        if hasattr(self._whole, "scores"):
            return Measured(metrics, np.asarray(self._whole.scores(), np.float64))
        if hasattr(self._whole, "resampled"):
            values: Any = self._whole.resampled(random_halves(self.rows))
        else:
            values = [self._value(m) if n else math.nan for m, n in zip(self._halves, self._members, strict=True)]
        return Measured(metrics, None, np.asarray(values, np.float64))

    def _value(self, half: Meter) -> float:
        try:
            return half.result()[self._task.primary]
        except DataError:
            return math.nan


def random_halves(rows: int) -> NDArray[np.bool_]:
    """Which rows are in which half, [HALVES, rows]: the same for every model, and for the rows that come first."""
    return (np.random.default_rng(0).random((rows, HALVES)) < 0.5).T


def loss_error(reference: Measured, candidate: Measured, *, further: float) -> float | None:
    """Standard error of the difference of two models' primary metrics on the same rows; None where it is not known.

    Args:
        further: standard error of what these rows do not show and others may: the spread of rows that all agree is 0.
    """
    if reference.scores is not None and candidate.scores is not None:
        differences = reference.scores - candidate.scores
        if len(differences) < 2:
            return None
        return math.hypot(float(differences.std(ddof=1)) / math.sqrt(len(differences)), further)
    differences = reference.halves - candidate.halves
    known = differences[np.isfinite(differences)]
    return math.hypot(float(known.std(ddof=1)), further) if len(known) >= _FEWEST_HALVES else None
