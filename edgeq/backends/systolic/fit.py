"""Fit a lowered program to samples: keep a change if it brings the outputs closer to the float model's.

edgeq fits a program in two ways:

- Rounding weights: edgeq minimises the error of a layer's output, not of each weight
  (`edgeq.quantization.gptq`). The integers that a layer reads in the program decide which errors matter. The
  bias absorbs the shift of the mean that rounding causes.
- Correcting biases: rounded weights and clipped activations shift the mean of a layer's output, and the shifts add up.
  edgeq runs the program once over some samples. Each layer reads the output of the corrected layers before it. The
  difference between the layer's mean and the float model's goes into its int32 bias, channel by channel (Nagel et al.
  2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2, with data instead of
  their assumptions). Let y be the float output after the activation, z the integer output, and p the share of z that is
  not cut. The shift is one Newton step, (mean y - mean z) / p. Channels that are nearly always cut do not change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.lower import LARGEST_BIAS
from edgeq.backends.systolic.offsets import OFFSET
from edgeq.backends.systolic.program import Array, Floats, Network, Program, Weighted
from edgeq.backends.systolic.simulate import Simulator
from edgeq.data.samples import Samples
from edgeq.model.graph import GraphIndex
from edgeq.model.parts import with_outputs
from edgeq.model.sessions import open_in_memory
from edgeq.quantization.gptq import damp, round_rows, squared_errors

Change = Callable[[Weighted, NDArray[Any]], Weighted]
"""A function that takes a step and its integer input [N, ...], and returns the step to use instead."""

_MOST_TAPS = 1152
"""Layers with more taps keep their weights: rounding time grows with the cube of the taps, and the gain falls."""

# Four times as many inputs as unknowns keep the error's metric well conditioned; the bounds limit time and memory.
_PATCHES_PER_TAP = 4

_FEWEST, _MOST = 512, 8192


def rounded_weights(network: Network) -> Change:
    """Return a function that rounds a step's weights again, for the least error of its output.

    Args:
        network: the network that the program was made from, with float weights.
    """
    layers: Mapping[str, Weighted] = {layer.name: layer for layer in network.layers if isinstance(layer, Weighted)}

    def rounded(step: Weighted, x: NDArray[Any]) -> Weighted:
        """Return `step` with its weights rounded again. A row changes only if the new weights are more accurate on
        input `x`.
        """
        layer = layers[step.name]
        groups, outputs = getattr(step, "groups", 1), len(step.bias)
        taps = step.weights[0].size
        if taps > _MOST_TAPS:
            return step
        scales = steps.tile_values(step.tiles, "weight_scale").astype(np.float64)
        exact = (layer.weights.reshape(outputs, taps) / scales[:, None]).reshape(groups, -1, taps)
        patches = _patches(step, x, groups)
        mean = patches.mean(axis=1, keepdims=True)
        # The mean's share of the error goes into the bias, so the weights are fitted to the deviations only.
        centred = patches - mean
        metric = damp(centred.transpose(0, 2, 1) @ centred / centred.shape[1], 1.0)
        nearest = step.weights.reshape(exact.shape).astype(np.int64)
        fitted = round_rows(exact, metric, np.array(-steps.LARGEST), np.array(steps.LARGEST))
        # Row by row: the search is a heuristic and may end with worse weights than the nearest integers.
        better = squared_errors(exact - fitted, metric) < squared_errors(exact - nearest, metric)
        integers = np.where(better[..., None], fitted, nearest)
        moved = ((nearest - integers) * mean).sum(axis=2).ravel()
        bias = np.clip(np.rint(step.bias + moved), -LARGEST_BIAS, LARGEST_BIAS).astype(np.int32)
        return replace(step, weights=integers.reshape(step.weights.shape).astype(np.int8), bias=bias)

    return rounded


def _patches(step: Weighted, x: NDArray[Any], groups: int) -> Floats:
    """Return the inputs of randomly chosen output positions: float64 [groups, positions, taps]."""
    taps = step.weights[0].size
    count = int(np.clip(_PATCHES_PER_TAP * taps, _FEWEST, _MOST))
    # A fixed seed: the same model must give the same bytes.
    random = np.random.default_rng(taps)
    if isinstance(step, steps.Fc):
        rows = x.reshape(-1, taps)
        return np.asarray(rows[random.integers(0, len(rows), count)], np.float64)[None]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(step.weights.shape[2:], step.dilations, strict=True)]
    padded = np.pad(x, ((0, 0), (0, 0), (step.pads[0], step.pads[2]), (step.pads[1], step.pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    windows = windows[:, :, :: step.strides[0], :: step.strides[1], :: step.dilations[0], :: step.dilations[1]]
    sample, row, column = (random.integers(0, windows.shape[axis], count) for axis in (0, 2, 3))
    drawn = windows[sample, :, row, column].reshape(count, groups, taps)
    return np.asarray(drawn.transpose(1, 0, 2), np.float64)


# If fewer than this share of a channel's results are uncut, moving its bias hardly moves its mean.
_FLAT = 0.05


def corrected_layers(program: Program) -> dict[str, int]:
    """Return, in program order, the float tensors whose means are needed for bias correction, each with its channel
    axis.
    """
    layers = (step for step in program.steps if isinstance(step, Weighted))
    return {program.tensors[step.output].origin: _channel_axis(step) for step in layers}


def _channel_axis(step: Weighted) -> int:
    """Return the channel axis of a step's output. A product has its channels on the last axis, because there may be
    several rows for each sample.
    """
    return 1 if isinstance(step, steps.Conv) else -1


def correct_biases(
    program: Program, inputs: Mapping[str, Array], means: Mapping[str, Floats], *, change: Change | None = None
) -> Program:
    """Return `program` with biases that cancel the mean errors of its layers.

    Args:
        inputs: samples [N, ...] by input name.
        means: means of the float model's channels over the same samples, by the names in `corrected_layers`.
        change: a function that changes each step before its bias is corrected; None changes nothing.
    """
    simulator = Simulator(program, keep_sums=True)

    def corrected(step: Weighted, x: Array) -> Weighted:
        """Return `step` with a corrected bias. For each output channel, the mean error of the outputs for `x` is
        subtracted from the bias, in accumulator units.
        """
        step = change(step, x) if change is not None else step
        tensor = program.tensors[step.output]
        if tensor.origin not in means:
            return step
        y = simulator.compute(step, [x])
        shift = _shift(np.moveaxis(y, _channel_axis(step), 0), means[tensor.origin], tensor, relu=step.relu)
        # The float tensor may have its channels on another axis than the step.
        if shift is None or len(shift) != len(step.bias):
            return step
        scale = program.tensors[step.input].scale
        assert scale is not None
        units = steps.tile_values(step.tiles, "weight_scale").astype(np.float64) * scale
        bias = np.clip(np.rint(step.bias + shift / units), -LARGEST_BIAS, LARGEST_BIAS).astype(np.int32)
        return replace(step, bias=bias)

    return replace(program, steps=simulator.walk(inputs, corrected))


def channel_means(values: Array, axis: int) -> Floats:
    """Return the mean of each channel over all axes but the channel `axis`: float64 [channels]."""
    return np.asarray(np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1).mean(axis=1, dtype=np.float64))


def _shift(y: Array, mean: Floats, tensor: steps.Tensor, *, relu: bool) -> Floats | None:
    """Return the correction of the mean of each channel of `y` [channels, ...].

    Return None if `mean` has a different number of channels.
    """
    if len(y) != len(mean):
        return None
    assert tensor.scale is not None
    # The program's channels may be sorted; the float model's are not.
    target = mean if tensor.channels is None else mean[list(tensor.channels)]
    axes = tuple(range(1, y.ndim))
    actual = y.astype(np.float64).mean(axis=axes) * tensor.scale
    # A value that is cut does not follow the bias.
    free = ((y > (0 if relu else -128)) & (y < 127)).mean(axis=axes)
    return np.where((free > _FLAT) & np.isfinite(target), (target - actual) / np.maximum(free, _FLAT), 0.0)


SAMPLES = 48
"""Number of samples for fitting weights and biases. Each third is also used to judge a fit to the other two thirds."""

# Each fit sees two thirds of the samples, and each sample judges once.
_FOLDS = 3

# A fitting method that is this many decibels behind the best on the samples so far is not tried on the remaining
# samples.
_BEHIND = 6.0

# Minimum gain, in decibels, for which a fit is kept. A smaller gain may be due to the choice of samples.
_WORTH_FITTING = 1.0

# All tensors of all samples are in memory at once while biases are corrected: at most 512 MiB.
_MEMORY = 2**29


@dataclass(frozen=True)
class FloatReference:
    """Hold the outputs of the float model for some samples.

    Attributes:
        inputs: arrays [N, ...] by name.
        outputs: float32 outputs by name, one array for each sample.
        channels: channel means by tensor, float64 [N, channels].
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Sequence[Array]]
    channels: Mapping[str, Floats]

    @property
    def means(self) -> dict[str, Floats]:
        """Return the mean of each channel over all samples: float64 [channels] by tensor."""
        return {name: rows.mean(axis=0) for name, rows in self.channels.items()}

    def folds(self) -> Iterator[tuple[FloatReference, FloatReference]]:
        """Yield pairs of samples: some to fit to, and some to judge the fit on. Each sample is used once for judging.

        If there are too few samples, yield one pair with all samples on both sides.
        """
        count = len(next(iter(self.inputs.values())))
        if count < _FOLDS:
            yield self, self
            return
        for fold in range(_FOLDS):
            # Interleaved, because neighbouring samples may be alike.
            held_out = np.arange(count) % _FOLDS == fold
            yield self._subset(np.flatnonzero(~held_out)), self._subset(np.flatnonzero(held_out))

    def _subset(self, places: NDArray[np.intp]) -> FloatReference:
        outputs = {name: [rows[place] for place in places] for name, rows in self.outputs.items()}
        inputs, channels = ({n: v[places] for n, v in part.items()} for part in (self.inputs, self.channels))
        return FloatReference(inputs, outputs, channels)


class FittedProgram(NamedTuple):
    """Hold a fitted program, and the SQNR of its fitting method on samples that were not used for fitting."""

    program: Program
    sqnr_db: float


def fit_program(unfitted: Program, network: Network, reference: FloatReference) -> FittedProgram:
    """Return `unfitted` fitted by the best method: rounded weights, corrected biases, both or neither.

    Each third of the samples is used to judge fits to the other two thirds. The best method is then fitted to all
    samples.
    """
    rounded = rounded_weights(network)
    # The order breaks ties: of equal ways, `max` takes the first, which changes the least.
    ways: tuple[Callable[[FloatReference], Program], ...] = (
        lambda fold: unfitted,
        lambda fold: correct_biases(unfitted, fold.inputs, fold.means, change=rounded),
        lambda fold: correct_biases(unfitted, fold.inputs, fold.means),
        lambda fold: correct_biases(unfitted, fold.inputs, {}, change=rounded),
    )
    powers = dict.fromkeys(ways, np.zeros(2))
    for fit, judge in reference.folds():
        for way in powers:
            powers[way] = powers[way] + _powers(way(fit), judge)
        best = max(powers, key=lambda way: _decibels(powers[way]))
        limit_db = _decibels(powers[best]) - _BEHIND
        powers = {way: power for way, power in powers.items() if _decibels(power) >= limit_db}
        if len(powers) == 1:
            break
    unchanged = powers.get(ways[0])
    if unchanged is not None and _decibels(powers[best]) < _decibels(unchanged) + _WORTH_FITTING:
        return FittedProgram(unfitted, _decibels(unchanged))
    return FittedProgram(best(reference), _decibels(powers[best]))


def observe(model: ir.Model, program: Program, samples: Samples, shifted: Mapping[str, str]) -> FloatReference:
    """Run the float model on as many samples as fit into memory, spread evenly over all the samples.

    Files are often sorted by class, so the first samples would not be representative.
    """
    size = 4 * sum(math.prod(t.shape) for t in program.tensors.values() if t.dtype == "int8")
    count = max(min(SAMPLES, _MEMORY // max(size, 1)), 1)
    outputs = GraphIndex(model).outputs
    model_tensors = {value.name for node in model.graph for value in node.outputs}
    axes = {shifted.get(name, name): axis for name, axis in corrected_layers(program).items()}
    names = {name: axis for name, axis in axes.items() if name in model_tensors}
    observed = with_outputs(model, names)
    session = open_in_memory(observed)
    feeds: list[Mapping[str, Array]] = []
    sums: dict[str, list[Array]] = {name: [] for name in names}
    results: dict[str, list[Array]] = {name: [] for name in outputs}
    stride = max(len(samples) // count, 1)
    for sample in itertools.islice(samples, 0, stride * count, stride):
        feed = {name: np.asarray(sample.inputs[name]) for name in program.inputs}
        # The program runs one sample at a time, whatever the batch of the data is.
        feed = {name: value[:1] if value.ndim else value for name, value in feed.items()}
        feeds.append(feed)
        fetched = dict(zip([*outputs, *names], session.run([*outputs, *names], feed), strict=True))
        for name in names:
            sums[name].append(channel_means(fetched[name], names[name]))
        for name in outputs:
            results[name].append(np.atleast_1d(fetched[name]))
    channels = {name: np.asarray(parts, np.float64) for name, parts in sums.items()}
    scales = {tensor.origin: tensor.scale for tensor in program.tensors.values() if tensor.scale is not None}
    for name, origin in shifted.items():
        if origin in channels:
            # The program's tensor is stored with the offset subtracted, so its mean is lower by it.
            channels[name] = channels[origin] - OFFSET * scales[name]
    return FloatReference(
        {name: np.concatenate([np.atleast_1d(feed[name]) for feed in feeds]) for name in program.inputs},
        {name: parts for name, parts in results.items() if parts[0].dtype == np.float32},
        channels,
    )


def _powers(program: Program, reference: FloatReference) -> Floats:
    """Return the power of the float model's outputs and the power of the program's errors, each summed over all
    outputs.
    """
    tensors = Simulator(program).run(reference.inputs).tensors
    signal = noise = 0.0
    for name, parts in reference.outputs.items():
        # If the batch is not the first axis, a tensor has several rows for each sample.
        exact = np.concatenate(parts).astype(np.float64)
        # A model may mask values with infinities, which no integer can follow.
        finite = np.isfinite(exact)
        signal += float((exact[finite] ** 2).sum())
        noise += float(((tensors[name][finite] - exact[finite]) ** 2).sum())
    return np.array([signal, noise])


def _decibels(powers: Floats) -> float:
    signal, noise = powers
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise and signal else math.inf
