"""A convolution's image as the rows of a matrix product."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


@dataclass(frozen=True)
class Geometry:
    """How a convolution's kernel moves; one entry per spatial axis.

    Attributes:
        kernel, strides, dilations: sizes.
        pads: (before, after).
        group: groups of channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    group: int


def geometry(node: ir.Node, image: tuple[int, ...], kernel: tuple[int, ...]) -> Geometry:
    """The geometry of a convolution node on an image of these spatial sizes."""
    given, axes = node.attributes, len(kernel)
    strides = tuple(given.get_ints("strides", [1] * axes))
    dilations = tuple(given.get_ints("dilations", [1] * axes))
    auto = given.get_string("auto_pad", "NOTSET")
    pads = list(given.get_ints("pads", [0] * 2 * axes))
    if auto == "VALID":
        pads = [0] * 2 * axes
    elif auto != "NOTSET":
        totals = [
            max(0, (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1 - size)
            for size, stride, taps, dilation in zip(image, strides, kernel, dilations, strict=True)
        ]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = less + more if auto == "SAME_UPPER" else more + less
    both = tuple((int(pads[axis]), int(pads[axis + axes])) for axis in range(axes))
    return Geometry(kernel, strides, dilations, both, given.get_int("group", 1))


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
