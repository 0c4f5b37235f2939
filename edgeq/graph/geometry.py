"""How the kernel of a convolution or a pooling moves over an image, its padding worked out."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves; one entry per spatial axis.

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
    """The geometry of a convolution or pooling node on an image of these spatial sizes."""
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
