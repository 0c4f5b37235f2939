"""Weights rounded for the least error of what a layer gives, instead of each weight's (`edgeq.backends.least_error`).

The integers that a layer reads in the program decide which errors matter. What the rounding does to the mean goes into
the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.least_error import damped, round_rows, squared
from edgeq.backends.systolic.network import ConvLayer, FcLayer, Floats, Network
from edgeq.backends.systolic.program import Conv, Fc, tile_values
from edgeq.backends.systolic.tiles import LARGEST

Change = Callable[[Conv | Fc, NDArray[Any]], Conv | Fc]
"""Gives a step in place of one, by what it reads: integers [N, ...]."""
_MOST_TAPS = 1152
"""Most taps of a layer whose weights are rounded: the time grows with the third power, and the gain falls."""
_PATCHES_PER_TAP = 4
_FEWEST, _MOST = 512, 8192
_LARGEST_BIAS = 2.0**30


def rounded_weights(network: Network) -> Change:
    """Return what rounds a step's weights again.

    Args:
        network: that the program was made from, with its weights in float.
    """
    layers: Mapping[str, ConvLayer | FcLayer] = {
        layer.name: layer for layer in network.layers if isinstance(layer, ConvLayer | FcLayer)
    }

    def rounded(step: Conv | Fc, x: NDArray[Any]) -> Conv | Fc:
        """Return `step` with other integers where they are better for input `x`."""
        layer = layers[step.name]
        groups, outputs = getattr(step, "groups", 1), len(step.bias)
        taps = step.weights[0].size
        if taps > _MOST_TAPS:
            return step
        scales = tile_values(step.tiles, "weight_scale").astype(np.float64)
        wanted = (layer.weights.reshape(outputs, taps) / scales[:, None]).reshape(groups, -1, taps)
        patches = _patches(step, x, groups)
        mean = patches.mean(axis=1, keepdims=True)
        centred = patches - mean
        metric = damped(centred.transpose(0, 2, 1) @ centred / centred.shape[1], 1.0)
        nearest = step.weights.reshape(wanted.shape).astype(np.int64)
        found = round_rows(wanted, metric, np.array(-LARGEST), np.array(LARGEST))
        better = squared(wanted - found, metric) < squared(wanted - nearest, metric)
        chosen = np.where(better[..., None], found, nearest)
        moved = ((nearest - chosen) * mean).sum(axis=2).ravel()
        bias = np.clip(np.rint(step.bias + moved), -_LARGEST_BIAS, _LARGEST_BIAS).astype(np.int32)
        return replace(step, weights=chosen.reshape(step.weights.shape).astype(np.int8), bias=bias)

    return rounded


def _patches(step: Conv | Fc, x: NDArray[Any], groups: int) -> Floats:
    """Return what some output positions read, at random: float64 [groups, positions, taps]."""
    taps = step.weights[0].size
    count = int(np.clip(_PATCHES_PER_TAP * taps, _FEWEST, _MOST))
    random = np.random.default_rng(taps)
    if isinstance(step, Fc):
        rows = x.reshape(-1, taps)
        return np.asarray(rows[random.integers(0, len(rows), count)], np.float64)[None]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(step.weights.shape[2:], step.dilations, strict=True)]
    padded = np.pad(x, ((0, 0), (0, 0), (step.pads[0], step.pads[2]), (step.pads[1], step.pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=(2, 3))
    windows = windows[:, :, :: step.strides[0], :: step.strides[1], :: step.dilations[0], :: step.dilations[1]]
    sample, row, column = (random.integers(0, windows.shape[axis], count) for axis in (0, 2, 3))
    drawn = windows[sample, :, row, column].reshape(count, groups, taps)
    return np.asarray(drawn.transpose(1, 0, 2), np.float64)
