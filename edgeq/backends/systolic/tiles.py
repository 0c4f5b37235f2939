"""Weights as int8, one scale for the whole layer or one for each tile of output channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.network import Floats
from edgeq.backends.systolic.program import Int8s, Int32s, Tile
from edgeq.graph.quant_params import QuantParams

LARGEST = 127
# Neighbouring tiles whose scales differ less than this share one: a split costs the runtime of the dialect file a
# convolution call, and a twentieth of a bit is not worth it.
_SAME = 1.05
# How far from a whole number float32 may put a weight of a grid; and how many weights suffice to rule out most grids.
_ON_GRID = 1e-3
_FIRST = 16
_LARGEST_BIAS = 2.0**30
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
