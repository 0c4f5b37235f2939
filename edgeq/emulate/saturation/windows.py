"""A convolution's image as the rows of a matrix product."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.graph.geometry import Geometry


def windows(x: NDArray[Any], shape: Geometry, padding: int) -> tuple[NDArray[Any], tuple[int, ...]]:
    """[N, C, *image] → [N, *out, taps, C], padded with `padding`, and the size of the output image."""
    x = np.pad(x, ((0, 0), (0, 0), *shape.pads), constant_values=padding)
    sizes = tuple(
        (size - (taps - 1) * dilation - 1) // stride + 1
        for size, taps, dilation, stride in zip(x.shape[2:], shape.kernel, shape.dilations, shape.strides, strict=True)
    )
    last = np.moveaxis(x, 1, -1)
    taps = []
    for tap in itertools.product(*map(range, shape.kernel)):
        cut = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, shape.dilations, sizes, shape.strides, strict=True)
        )
        taps.append(last[(slice(None), *cut)])
    return np.stack(taps, axis=-2), sizes
