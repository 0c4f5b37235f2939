"""Choose the scales of a layer's weights by the error of the layer's output, if scales are coarse: powers of two, or
one scale for the whole weight.

The largest weight decides the scale. A power of two may be almost twice as large as it needs. With one scale for all
outputs, a single output may have weights a hundred times as large as the others, which then round to zero. So smaller
scales are tried as well. The weights of an output that exceed them are either cut off, or the output's weights are all
made smaller by one factor.

Either changes the output. This often has no effect, because the activation function after the layer cuts the output
off: an output that jumps between both ends of a Clip does so with half the weights as well. So errors are compared
after the activation function, on patches that the layer reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeq.model.quant_params import fit_scale
from edgeq.quantization.bias_fit import largest_bias
from edgeq.quantization.gptq import round_rows
from edgeq.quantization.params import weight_limits
from edgeq.scheme import ScaleForm, Scheme
from edgeq.tuning.recover.layers import Floats
from edgeq.tuning.recover.output_means import OutputView
from edgeq.tuning.recover.quantized_file import IntegerLayer

Integers = NDArray[np.int64]
# How often the smallest scale that covers all weights is halved: with one scale for all outputs, and with a scale for
# each. Other outputs then have no need of much smaller scales.
_HALVINGS = {False: 4, True: 1}
# The ratio of a scale to the next one that is tried.
_STEPS: Mapping[ScaleForm, float] = {"any": 2.0**0.5, "power-of-two": 2.0}


@dataclass(frozen=True, eq=False)
class ScaleChoice:
    """Hold scales for the weights of a layer, float64 [outputs], and the integers [groups, outputs per group, taps]."""

    scale: Floats
    integers: Integers


def choose_scales(
    integer: IntegerLayer,
    rows: Floats,
    bias: Floats,
    patches: NDArray[np.float32],
    metric: Floats,
    view: OutputView,
    *,
    scheme: Scheme,
    importance: Floats,
) -> ScaleChoice:
    """Return the scales with the least squared error after the activation function.

    Args:
        rows: the float weights, float64 [groups, outputs per group, taps].
        bias: the float bias, float64 [outputs].
        patches: what the layer reads, float32 [groups, positions, taps].
        metric: weighs errors of the weights, float64 [groups, taps, taps].
        view: the activation function after the layer, and the ends of the output's range.
        importance: how much the square of an error counts, float64 [outputs].
    """
    limits = weight_limits(scheme.weight_type, scheme.reduce_range)
    products = patches.transpose(0, 2, 1).astype(np.float64)
    mean = products.mean(2)
    target = _observe(view, (rows @ products).reshape(len(bias), -1) + bias[:, None])
    best_scale, best_rows, best_error = integer.params.scale, rows, np.full(len(bias), np.inf)
    for scale in _candidates(integer, rows, limits[1], scheme):
        fitted, error = rows, np.full(len(bias), np.inf)
        for smaller in _within(rows, integer.per_row(scale) * limits[1]):
            # Rounding each weight to the nearest integer is enough to compare scales, and takes a fraction of the time.
            weights = integer.per_row(scale) * np.clip(np.rint(smaller / integer.per_row(scale)), *limits)
            # The bias takes up the mean error, as far as it fits.
            start = bias + ((rows - weights) * mean[:, None]).sum(2).ravel()
            limit = largest_bias(scheme) * integer.input_scale * scale
            outputs = (weights @ products).reshape(len(bias), -1) + np.clip(start, -limit, limit)[:, None]
            squares = ((_observe(view, outputs) - target) ** 2).mean((0, 2)) * importance
            fitted, error = np.where(integer.per_row(squares < error), smaller, fitted), np.minimum(error, squares)
        better = error < best_error if scheme.per_channel else np.full(len(bias), error.sum() < best_error.sum())
        best_scale, best_error = np.where(better, scale, best_scale), np.where(better, error, best_error)
        best_rows = np.where(integer.per_row(better), fitted, best_rows)
    low, high = (np.full((1, 1, 1), limit, np.int64) for limit in limits)
    return ScaleChoice(best_scale, round_rows(best_rows / integer.per_row(best_scale), metric, low, high))


def _candidates(integer: IntegerLayer, rows: Floats, largest: int, scheme: Scheme) -> Iterator[Floats]:
    """Yield scales to try, float64 [outputs], the largest first. They depend on the float weights, so that a second
    pass finds the same, and on a scale of the file that a large bias has raised.
    """
    reach = np.abs(rows).max(2).ravel()
    reach = reach if scheme.per_channel else np.full_like(reach, reach.max())
    scale = integer.params.scale
    natural = np.where(reach > 0, fit_scale(reach / largest, scheme.scale), scale).astype(np.float32)
    if np.any(scale > natural):
        yield np.maximum(scale, natural)
    step, halvings = _STEPS[scheme.scale], _HALVINGS[scheme.per_channel]
    for count in range(round(halvings / math.log2(step)) + 1):
        # A file has float32 scales.
        yield (natural / step**count).astype(np.float32).astype(np.float64)


def _within(rows: Floats, reach: Floats) -> Iterator[Floats]:
    """Yield weights to round: those that are too large are cut off later, or their output's weights are made smaller.

    Args:
        reach: the largest magnitude that integers can represent, float64 [groups, outputs per group, 1].
    """
    yield rows
    largest = np.abs(rows).max(2, keepdims=True)
    if np.any(largest > reach):
        yield rows * np.minimum(1.0, reach / np.maximum(largest, np.finfo(np.float64).tiny))


def _observe(view: OutputView, outputs: Floats) -> Floats:
    """Return outputs [channels, positions] after clipping and the activation function, as [ends, channels,
    positions].
    """
    clipped = np.clip(outputs, *view.limits).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num(view.function(clipped)).reshape(-1, *clipped.shape), np.float64)
