"""A program with the channels of its tensors in the order of the float model.

Channels are sorted for the array (`order`). Where tensors are compared with the float model's, one by one, they have to
be in its order: the sums are of the same products, so that the integers are the same, in other places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.systolic.program import Conv, Fc, Program, Rearrange, Tile, tile_values

Order = NDArray[np.int64]


def in_origin_order(program: Program) -> Program:
    """`program` with every tensor's channels as the float model has them, and a tile for each channel of a layer whose
    results moved: for reference, not for an array."""
    places = {name: np.argsort(t.channels) for name, t in program.tensors.items() if t.channels is not None}
    reshaped = {s.output: s.input for s in program.steps if isinstance(s, Rearrange) and s.index is None}
    steps = tuple(_restored(step, places, reshaped) if isinstance(step, Conv | Fc) else step for step in program.steps)
    tensors = {name: replace(tensor, channels=None) for name, tensor in program.tensors.items()}
    return replace(program, steps=steps, tensors=tensors)


def _restored(step: Conv | Fc, places: Mapping[str, Order], reshaped: Mapping[str, str]) -> Conv | Fc:
    """A layer that reads and writes channels in the float model's order."""
    weights, bias, tiles = step.weights, step.bias, step.tiles
    outputs = places.get(step.output)
    if outputs is not None:
        scales, multipliers = (tile_values(tiles, field)[outputs].tolist() for field in ("weight_scale", "multiplier"))
        tiles = tuple(Tile(i, i + 1, *both) for i, both in enumerate(zip(scales, multipliers, strict=True)))
        weights, bias = weights[outputs], bias[outputs]
    if isinstance(step, Fc) or step.groups == 1:
        inputs = places.get(step.input, places.get(reshaped.get(step.input, "")))
        if inputs is not None:
            # A product that reads flattened images has as many weights for each channel as there are pixels.
            repeat = weights.shape[1] // len(inputs)
            weights = weights[:, (inputs[:, None] * repeat + np.arange(repeat)).ravel()]
    return replace(step, weights=weights, bias=bias, tiles=tiles)
