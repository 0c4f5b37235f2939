"""Weights rounded for the least error of what a layer gives, instead of each weight's (`edgeq.quantize.weight_only`).

The integers that a layer reads in the program decide which errors matter. What the rounding does to the mean goes into
the bias."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.network import ConvLayer, FcLayer, Floats, Network
from edgeq.backends.systolic.program import Conv, Fc, Int8s, Int32s, Tile, tile_values
from edgeq.model.quant_params import QuantParams
from edgeq.quantize.weight_only import damped, round_rows, squared

LARGEST = 127
# Neighbouring tiles whose scales differ less than this share one: a split costs the runtime of the dialect file a
# convolution call, and a twentieth of a bit is not worth it.
_SAME = 1.05
# How far from a whole number float32 may put a weight of a grid; and how many weights suffice to rule out most grids.
_ON_GRID = 1e-3
_FIRST = 16
_SMALL_BIAS = 2.0**20


@dataclass(frozen=True)
class IntegerWeights:
    """weights int8 as the float ones are laid out, bias int32 [O]."""

    weights: Int8s
    bias: Int32s
    tiles: tuple[Tile, ...]


def quantize_weights(
    weights: Floats,
    bias: Floats,
    *,
    input_scale: float,
    output_scale: float,
    dim: int,
    powers_of_two: bool,
) -> IntegerWeights:
    """Quantize weights [O, ...] symmetrically to -127..127, bias to int32 at input scale · weight scale.

    Args:
        dim: channels a tile.
    """
    outputs = len(weights)
    rows = weights.reshape(outputs, -1)
    limits = [
        (start, min(start + dim, outputs), _scale(rows[start : start + dim], bias[start : start + dim], input_scale))
        for start in range(0, outputs, dim)
    ]
    tiles = []
    for start, stop, scale in _merged(limits):
        if powers_of_two:
            scale = float(2.0 ** math.ceil(math.log2(scale)))
        product = np.float32(np.float32(input_scale) * np.float32(scale))
        tiles.append(Tile(start, stop, float(np.float32(scale)), float(np.float32(product / np.float32(output_scale)))))
    scales = np.repeat([t.weight_scale for t in tiles], [t.stop - t.start for t in tiles])
    zeros = np.zeros(outputs, np.int64)
    steps = (np.float32(input_scale) * scales.astype(np.float32)).astype(np.float64)
    integers = QuantParams(scales, zeros, ir.DataType.INT8, narrow=True).quantize(rows)
    biases = QuantParams(steps, zeros, ir.DataType.INT32).quantize(bias)
    return IntegerWeights(integers.reshape(weights.shape), biases, tuple(tiles))


def tile_maxima(rows: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Largest magnitude of each tile of `dim` rows of [O, ...], repeated for each of its rows: [O]."""
    largest = np.abs(rows.reshape(len(rows), -1)).max(axis=1, initial=0.0)
    starts = np.arange(0, len(rows), dim)
    return np.asarray(np.repeat(np.maximum.reduceat(largest, starts), np.diff([*starts, len(rows)])), np.float64)


def _scale(rows: Floats, bias: Floats, input_scale: float) -> float:
    """Scale of one tile. Where its weights are tiny beside its bias, the range of the int32 bias decides."""
    largest = _grid(rows) or float(np.abs(rows).max(initial=0.0)) / LARGEST
    offset = float(np.abs(bias).max(initial=0.0)) / input_scale
    least = offset / (_LARGEST_BIAS if largest else _SMALL_BIAS)
    return float(np.float32(max(largest, least))) or 1.0


def _grid(rows: Floats) -> float:
    """The step of a grid of at most 127 steps that holds all values, as weights that were quantized before have one; 0
    where there is none."""
    flat = rows.ravel()
    largest = float(np.abs(flat).max(initial=0.0))
    if not largest:
        return 0.0
    for count in range(LARGEST, 0, -1):
        places = flat[:_FIRST] * (count / largest)
        if np.abs(places - np.rint(places)).max() > _ON_GRID:
            continue
        places = flat * (count / largest)
        if np.abs(places - np.rint(places)).max() <= _ON_GRID:
            return largest / count
    return 0.0


def _merged(limits: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    merged = [limits[0]]
    for start, stop, scale in limits[1:]:
        first, _, before = merged[-1]
        if max(scale, before) < _SAME * min(scale, before):
            merged[-1] = (first, stop, max(scale, before))
        else:
            merged.append((start, stop, scale))
    return merged


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
