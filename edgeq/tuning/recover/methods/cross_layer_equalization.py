"""Equalize across layers: scale channels between two layers so that integers suit both layers and the tensor.

Let layers A and B have nothing between them but operators that commute with positive factors: Relu, pooling, or a Clip
from 0 whose bound no scaled channel reaches. Then channel c may be divided by k[c] in the weights of A and multiplied
by k[c] in those of B (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.1). That paper chooses k for the weights alone.

With one scale for each output channel, k costs A's weights nothing, and the tensor is best if all its channels have the
same magnitude. So several k are tried. Each is a product of powers of three magnitudes of each channel: the largest in
A's weights, in the tensor and in B's weights. The k with the least noise at B's output is chosen. The noise is the sum
of three errors, which are assumed to be independent. Here x is the tensor, step is the step of x / k, and u is the
input of A:

    of the tensor       sum_c  |B[:, c]|^2  min((step k[c])^2 / 12, E[x_c^2])
    of B's weights      sum_mc  e_mc^2  E[x_c^2] / k[c]^2              e: the rounding errors of B k
    of A's weights      sum_cj  |B[:, c]|^2  k[c]^2  e_cj^2  E[u_j^2]  e: those of A / k, with one scale for all rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from edgeq.calibration.channel_values import ChannelValues, observe_channels
from edgeq.calibration.rescaled import RescaledTensor
from edgeq.calibration.sampled_values import drawn_rows
from edgeq.data.samples import Samples
from edgeq.model.graph import GraphIndex, clamp_bounds, is_op, name_of, only_reader, readers
from edgeq.model.prepare import PreparedModel, save_rewritten
from edgeq.model.quant_params import fit_scale
from edgeq.quantization.bias_fit import WIDEST_BIAS
from edgeq.quantization.params import weight_limits
from edgeq.scheme import ScaleForm, Scheme
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.layers import (
    Floats,
    WeightedLayer,
    Weights,
    find_layers,
    input_channels,
    only_layers,
    spread_over_taps,
)
from edgeq.util.display import Progress

_COMMUTING = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LeakyRelu", "MaxPool", "Relu"})
# Exponents of the channels' magnitudes in k: (of A's weights, of the tensor). The exponent of B's weights is their sum
# minus 1.
_POWERS = ((0.5, 0.0), (0.0, 0.5), (0.0, 0.75), (0.0, 1.0))
# Scaling one pair changes the range that the next pair sees, so the first pairs are visited again.
_SWEEPS = 2
_MIN_GAIN = 10 ** (-1 / 10)
"""A gain of one decibel multiplies the noise by this factor. A smaller gain is not worth building another model."""
# It bounds the factor of a channel that is almost always zero.
_WIDEST = 1e3
# A channel counts as cut if it reaches this share of the Clip's bound.
_CUT = 1 - 1e-6


@dataclass(frozen=True)
class CrossLayerEqualization(Recovery):
    """Equalize across layers. The nodes do not change."""

    name: str = "cross-layer-equalization"
    title: str = "channels between two layers scaled for the least noise of both and of the tensor"
    stage: Stage = "model"
    free: bool = True
    order = 10

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Equalize the layers of `state`.

        Raises:
            EdgeqError: the model refuses a sample.
        """
        float_nodes = set(state.scheme.exclude)
        every = find_pairs(state.prepared.model)
        # A pair that stays in float as a whole gains nothing from another scale.
        pairs = [p for p in every if not float_nodes.issuperset((p.maker.name, *(r.name for r in p.readers)))]
        if not pairs:
            return state.note(f"{self.name}: no layer's output is read only by layers")
        model = state.prepared.model.clone()
        clipped = [pair for pair in pairs if math.isfinite(pair.bound)]
        values = _observe_between(state.prepared, clipped, samples, progress) if clipped else {}
        factors = equalize(state.prepared, model, pairs, samples, state.scheme, values)
        if not factors:
            return state.note(f"{self.name}: none of {len(pairs)} pairs of layers gains")
        prepared = save_rewritten(state.prepared, model, workdir / "equalized.onnx")
        scaled = [pair for pair in pairs if pair.tensor in factors]
        changed = {layer.name for pair in scaled for layer in (pair.maker, *pair.readers)}
        names = ", ".join(pair.maker.name for pair in scaled)
        if unobserved := [pair for pair in scaled if pair.tensor not in values]:
            values = {**values, **_observe_between(state.prepared, unobserved, samples, progress)}
        rescaled = {t: RescaledTensor(t, values[t], factors[pair.tensor]) for pair in scaled for t in pair.between}
        return state.replace(prepared=prepared, changed=state.changed | changed, rescaled=rescaled).note(
            f"{self.name}: channels after {len(factors)} of {len(pairs)} layers scaled: {names}"
        )


@dataclass(frozen=True, eq=False)
class ScaledPair:
    """Describe layers between which channels can be scaled.

    Attributes:
        maker: the layer that computes the channels.
        tensor: the tensor that the readers read, after the operators that commute with factors.
        readers: the layers that read the tensor.
        bound: the upper bound of a Clip between them; infinity without a Clip.
        between: the tensors between the layers. All have the same channels on the same axis; `tensor` is the last one.
    """

    maker: WeightedLayer
    tensor: str
    readers: tuple[WeightedLayer, ...]
    bound: float = math.inf
    between: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ChannelFigures:
    """Hold figures of each channel of a tensor, float64 [channels]: the largest magnitudes below and above zero, and
    the mean square.
    """

    below: Floats
    above: Floats
    power: Floats

    def over(self, factor: Floats) -> ChannelFigures:
        """Return the figures of the tensor after it is divided by `factor` [channels]."""
        return ChannelFigures(self.below / factor, self.above / factor, self.power / factor**2)


def find_pairs(model: ir.Model) -> tuple[ScaledPair, ...]:
    """Return all pairs of the main graph, in the order of the graph."""
    layers = {layer.name: layer for layer in find_layers(model)}
    weights, values = Weights(model), GraphIndex(model).values
    pairs = []
    for maker in layers.values():
        tensor, bound = values[maker.output], math.inf
        between = [maker.output]
        while (node := only_reader(tensor)) is not None and len(node.outputs) == 1:
            cut = math.inf if is_op(node, *_COMMUTING) else _find_clip(node)
            if cut is None:
                break
            tensor, bound = node.outputs[0], min(bound, cut)
            between.append(name_of(tensor))
        name = name_of(tensor)
        behind = () if tensor.is_graph_output() else only_layers(readers(tensor), name, maker, layers)
        if behind and weights.are_read_once(maker.weight, maker.bias, *(reader.weight for reader in behind)):
            pairs.append(ScaledPair(maker, name, behind, bound, tuple(between)))
    return tuple(pairs)


def _observe_between(
    prepared: PreparedModel, pairs: Sequence[ScaledPair], samples: Samples, progress: Progress
) -> Mapping[str, ChannelValues]:
    """Return the values of all tensors between the layers of `pairs`."""
    axes = {tensor: pair.maker.channel_axis for pair in pairs for tensor in pair.between}
    return observe_channels(prepared, axes, samples, progress)


def equalize(
    prepared: PreparedModel,
    model: ir.Model,
    pairs: Sequence[ScaledPair],
    samples: Samples,
    scheme: Scheme,
    values: Mapping[str, ChannelValues],
) -> dict[str, Floats]:
    """Scale the channels of `pairs` in `model`, in place, if that reduces the noise.

    Args:
        prepared: the model before the change.
        model: a clone of the prepared model.
        values: the values of the tensors of pairs with a Clip, by name.

    Returns:
        The factors by which tensors were divided, float64 [channels], by name. Unchanged tensors are left out.
    """
    figures = observe(prepared, pairs, samples)
    weights = Weights(model)
    total: dict[str, Floats] = {}
    for _ in range(_SWEEPS):
        for pair in pairs:
            input_figures = figures[pair.maker.source].over(total.get(pair.maker.source, np.ones(1)))
            tensor_figures = figures[pair.tensor].over(total.get(pair.tensor, np.ones(1)))
            share: Floats | float = 0.0
            if math.isfinite(pair.bound):
                share = values[pair.tensor].maximum / total.get(pair.tensor, np.ones(1)) / pair.bound
            factor = find_best_factor(weights, pair, input_figures, tensor_figures, scheme, share)
            if factor is not None:
                scale_pair(weights, pair, factor)
                total[pair.tensor] = total.get(pair.tensor, np.ones(1)) * factor
    return total


def scale_pair(weights: Weights, pair: ScaledPair, factor: Floats) -> None:
    """Divide the channels of a pair's tensor by `factor`, and multiply the weights of the readers by it."""
    weight, bias = weights.scaled_outputs(pair.maker, 1 / factor)
    weights.replace(pair.maker.weight, weight)
    if bias is not None:
        weights.replace(pair.maker.bias, bias)
    for reader in pair.readers:
        weights.scale_inputs(reader, factor)


def observe(prepared: PreparedModel, pairs: Sequence[ScaledPair], samples: Samples) -> Mapping[str, ChannelFigures]:
    """Return figures of channels on some samples, by the name of the tensor, for the tensors of `pairs` and the inputs
    of the pairs' first layers.
    """
    axes = {pair.maker.source: pair.maker.channel_axis for pair in pairs}
    axes |= {pair.tensor: pair.maker.channel_axis for pair in pairs}
    return {
        name: ChannelFigures(np.maximum(-rows.min(0), 0.0), np.maximum(rows.max(0), 0.0), (rows**2).mean(0))
        for name, rows in drawn_rows(prepared, axes, samples).items()
    }


def find_best_factor(
    weights: Weights,
    pair: ScaledPair,
    input_figures: ChannelFigures,
    tensor_figures: ChannelFigures,
    scheme: Scheme,
    reached: Floats | float = 0.0,
) -> Floats | None:
    """Return the factor with the least noise, float64 [channels]; None if it gains less than a decibel.

    Args:
        reached: largest value of each channel, divided by the pair's bound.
    """
    reach = _reach(pair.maker, weights), np.maximum(tensor_figures.below, tensor_figures.above)
    behind = np.max([_reach_of_inputs(reader, weights) for reader in pair.readers], axis=0)
    ones = np.ones(pair.maker.outputs)
    # The unscaled pair sets the bar, less the gain that makes another model worthwhile.
    best, bar = None, _MIN_GAIN * estimate_noise(weights, pair, input_figures, tensor_figures, ones, scheme)
    for maker_power, tensor_power in _POWERS:
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = reach[0] ** maker_power * reach[1] ** tensor_power * behind ** -(1 - maker_power - tensor_power)
        # A factor of a channel that is always zero improves nothing, but it may make the channel's bias very large.
        if scheme.scale != "any" or scheme.bias_bits < WIDEST_BIAS:
            factor = np.where(reach[1] > 0, factor, 0.0)
        factor = _normalise(factor)
        factor = _limit_factor(factor, np.asarray(reached))
        error = estimate_noise(weights, pair, input_figures, tensor_figures, factor, scheme)
        if error < bar:
            best, bar = factor, error
    return best


def estimate_noise(
    weights: Weights,
    pair: ScaledPair,
    input_figures: ChannelFigures,
    tensor_figures: ChannelFigures,
    factor: Floats,
    scheme: Scheme,
) -> float:
    """Return the expected squared error at the readers' outputs, summed over channels, if the tensor is divided by
    `factor`.
    """
    scaled = tensor_figures.over(factor)
    if scheme.activation_symmetric:
        width = 2 * float(np.maximum(scaled.below, scaled.above).max())
    else:
        width = float(scaled.below.max() + scaled.above.max())
    step = float(fit_scale(width / 255, scheme.scale))
    lowest, highest = weight_limits(scheme.weight_type, scheme.reduce_range)
    importance = sum((weights.input_importance(reader) for reader in pair.readers), np.zeros(pair.maker.outputs))
    # Values below half a step become zero, so their whole power is lost.
    total = float((importance * np.minimum((step * factor) ** 2 / 12, tensor_figures.power)).sum())
    for reader in pair.readers:
        rows = weights.rows(reader) * spread_over_taps(reader, factor)
        errors = _rounding_errors(rows, scheme.per_channel, highest - lowest, scheme.scale)
        total += float((errors**2 * spread_over_taps(reader, scaled.power)).sum())
    # With one scale for each output, dividing a row changes its scale but not its relative errors.
    if not scheme.per_channel:
        rows = weights.rows(pair.maker) / factor.reshape(pair.maker.groups, -1, 1)
        errors = _rounding_errors(rows, False, highest - lowest, scheme.scale)
        lost = (errors**2 * spread_over_taps(pair.maker, input_figures.power)).sum(2).reshape(-1)
        total += float((importance * factor**2 * lost).sum())
    return total


def _rounding_errors(rows: Floats, per_channel: bool, levels: int, form: ScaleForm) -> Floats:
    """Return the rounding errors of weights [groups, outputs, taps]. The weights are quantized around zero, with one
    scale for all outputs or one for each output.
    """
    steps = fit_scale(2 * np.abs(rows).max(2 if per_channel else None, keepdims=True) / levels, form)
    steps = np.where(steps > 0, steps, 1.0)
    return np.asarray(np.rint(rows / steps) * steps - rows, np.float64)


def _find_clip(node: ir.Node) -> float | None:
    """Return the constant upper bound of a Clip from 0; None for any other node."""
    low, high = clamp_bounds(node) or (-math.inf, math.inf)
    return high if low == 0 < high < math.inf else None


def _reach(layer: WeightedLayer, weights: Weights) -> Floats:
    """Return the largest magnitude of the weights of each output channel."""
    return np.asarray(np.abs(weights.rows(layer)).max(2).reshape(-1), np.float64)


def _reach_of_inputs(layer: WeightedLayer, weights: Weights) -> Floats:
    """Return the largest magnitude of the weights that read each input channel."""
    return np.asarray(np.abs(weights.rows(layer)).max(1).reshape(input_channels(layer), -1).max(1), np.float64)


def _limit_factor(factor: Floats, reached: Floats) -> Floats:
    """Return the factor, limited to what a Clip allows: channels that the Clip cuts are not scaled, and after the
    scaling it cuts no other channel.
    """
    cut = reached >= _CUT
    # A cut channel has its value at the bound, so the bound must not move for it.
    if cut.any():
        factor = np.where(cut, 1.0, factor / factor[cut].max())
    return np.maximum(factor, reached)


def _normalise(factor: Floats) -> Floats:
    """Return the factor scaled to a geometric mean of 1. Channels that are zero on either side get 1."""
    alive = np.isfinite(factor) & (factor > 0)
    if not alive.any():
        return np.ones_like(factor)
    safe = np.where(alive, factor, 1.0)
    middle = np.exp(np.log(safe[alive]).mean())
    return np.where(alive, np.clip(safe / middle, 1 / _WIDEST, _WIDEST), 1.0)


RECOVERY = CrossLayerEqualization()
