"""What several operators of windows and moves are written with: images, padding, slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import Tensor
from edgeq.model.graph import Geometry

NHWC: Order = (0, 2, 3, 1)
SAME, VALID = "SAME", "VALID"


def image(work: Lowering, node: ir.Node) -> Stored:
    found = work.read(node.inputs[0])
    if len(found.shape) != 4:
        raise CannotWriteError(f"its input has {len(found.shape)} axes; the file has windows on two of four")
    return work.arranged(found, NHWC)


def strides(shape: Geometry) -> dict[str, Any]:
    return {"strideH": shape.strides[0], "strideW": shape.strides[1]}


def dilations(shape: Geometry) -> dict[str, Any]:
    return {"dilationHFactor": shape.dilations[0], "dilationWFactor": shape.dilations[1]}


def same_pads(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return the padding that SAME stands for."""
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def with_padding(
    work: Lowering, node: ir.Node, source: Stored, shape: Geometry, lowest: bool = False
) -> tuple[Tensor, str]:
    """Return what a window reads and its padding: SAME or VALID where that is the node's, else VALID behind a PAD.

    Args:
        lowest: whether the padding is below all numbers, as MaxPool has it, not 0.
    """
    made = work.sizes(node.outputs[0])[2:]
    pads = []
    for axis in range(2):
        before, size = shape.pads[axis][0], source.shape[2 + axis]
        last = (made[axis] - 1) * shape.strides[axis] + (shape.kernel[axis] - 1) * shape.dilations[axis] + 1
        pads.append((before, max(last - size - before, 0)))
    if not any(map(any, pads)):
        return source.tensor, VALID
    same = [same_pads(source.shape[2 + a], shape.kernel[a], shape.strides[a], shape.dilations[a]) for a in range(2)]
    if same == pads and all(made[a] == -(-source.shape[2 + a] // shape.strides[a]) for a in range(2)):
        return source.tensor, SAME
    return pad(work, source.tensor, [(0, 0), *pads, (0, 0)], -np.inf if lowest else 0.0), VALID


def pad(work: Lowering, source: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    """Write a padding with one number; of integers the nearest one."""
    wide = tuple(size + before + after for size, (before, after) in zip(source.shape, pads, strict=True))
    made = work.like(source, f"{source.name}/padded", wide)
    table = work.fixed("paddings", np.array(pads, np.int32))
    filler, zero = filler_of(source, value)
    if filler == zero:
        return work.emit("PAD", (source, table), made)
    kind = source.type
    constant = work.fixed("padding", np.array([filler], np.dtype(kind)), source.scales)
    return work.emit("PADV2", (source, table, constant), made)


def filler_of(source: Tensor, value: float) -> tuple[float, float]:
    """Return the number that stands for `value` in a tensor, and the one for 0."""
    if source.scales is None:
        return (float(np.finfo(np.float32).min) if value == -np.inf else value), 0.0
    zero = int(source.scales.zero[0])
    if value == -np.inf:
        return -128, zero
    return int(np.clip(np.rint(value / float(source.scales.scale[0])) + zero, -128, 127)), zero


SLICING = {"beginMask": 0, "endMask": 0, "ellipsisMask": 0, "newAxisMask": 0, "shrinkAxisMask": 0, "offset": False}


def slices(work: Lowering, ends: Sequence[tuple[int, int]], steps: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    columns = ([b for b, _ in ends], [e for _, e in ends], list(steps))
    begin, end, step = (
        work.fixed(name, np.array(column, np.int32))
        for name, column in zip(("begin", "end", "strides"), columns, strict=True)
    )
    return begin, end, step
