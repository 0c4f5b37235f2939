"""Give images, and the windows that move over them, the form of the file: [N, H, W, C], and SAME or VALID padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.backends.litert.layout import Order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import TfliteTensor
from edgeq.backends.litert.operators.padding import pad
from edgeq.model.graph import KernelGeometry, geometry

# The only order of axes in which the file's kernels with windows exist.
NHWC: Order = (0, 2, 3, 1)

SAME, VALID = "SAME", "VALID"


def image(work: Lowering, node: ir.Node) -> Stored:
    """Return the input of a node as [N, H, W, C]. A sequence becomes an image of one row."""
    source = work.activation(node.inputs[0])
    # The file has no operators with windows on one axis.
    if len(source.shape) == 3:
        n, c, length = source.shape
        source = work.as_shape(source, (n, c, 1, length), f"{source.tensor.name}/row")
    if len(source.shape) != 4:
        raise CannotWriteError(f"its input has {len(source.shape)} axes; the file has windows on one or two")
    return work.arranged(source, NHWC)


def window(node: ir.Node, source: Stored, kernel: Sequence[int]) -> KernelGeometry:
    """Return how a node's windows move over an image. The windows of a sequence move over one row."""
    shape = geometry(node, source.shape[4 - len(kernel) :], tuple(kernel))
    if len(kernel) == 2:
        return shape
    return KernelGeometry(
        (1, *shape.kernel), (1, *shape.strides), (1, *shape.dilations), ((0, 0), *shape.pads), shape.group
    )


def image_size(work: Lowering, node: ir.Node) -> tuple[int, int]:
    """Return the number of rows and columns of the image that a node makes."""
    *rows, columns = work.sizes(node.outputs[0])[2:]
    return (rows[0] if rows else 1), columns


def write_image(
    work: Lowering,
    node: ir.Node,
    kind: str,
    inputs: Sequence[TfliteTensor | None],
    options: dict[str, Any] | None = None,
    *,
    like: TfliteTensor | None = None,
) -> None:
    """Write the operator that makes an image, like `Lowering.write`. For a sequence, write an image of one row and
    reshape it.
    """
    value, shape = node.outputs[0], work.sizes(node.outputs[0])
    if len(shape) == 4:
        work.write(node, kind, inputs, NHWC, options, like=like)
        return
    n, c, length = shape
    name, stored = f"{value.name}/row", (n, 1, length, c)
    output = work.like(like, name, stored) if like else work.partial(name, stored, work.parameters(node))
    work.emit(kind, inputs, output, options)
    work.hold(value, work.as_shape(Stored(output, NHWC, (n, c, 1, length)), shape, value.name or ""))


def strides(shape: KernelGeometry) -> dict[str, Any]:
    """Return the options for strides."""
    return {"strideH": shape.strides[0], "strideW": shape.strides[1]}


def dilations(shape: KernelGeometry) -> dict[str, Any]:
    """Return the options for dilations."""
    return {"dilationHFactor": shape.dilations[0], "dilationWFactor": shape.dilations[1]}


def same_pads(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return the padding that SAME stands for, as (before, after)."""
    # TensorFlow's rule: the output has ⌈size / stride⌉ positions, and the odd element of padding goes to the end.
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def with_padding(
    work: Lowering, node: ir.Node, source: Stored, shape: KernelGeometry, *, lowest: bool = False
) -> tuple[TfliteTensor, str]:
    """Return the tensor that a window reads, and the name of its padding.

    If the node's padding matches SAME or VALID, the tensor is the input. Otherwise, write a PAD and return its output
    and VALID.

    Args:
        lowest: whether to pad with the lowest number, as MaxPool does, instead of 0.
    """
    output_size = image_size(work, node)
    pads = []
    for axis in range(2):
        front, size = shape.pads[axis][0], source.shape[2 + axis]
        # The padding at the end follows from the output's size, because ceil_mode may need more than the node states.
        reach = (output_size[axis] - 1) * shape.strides[axis] + (shape.kernel[axis] - 1) * shape.dilations[axis] + 1
        pads.append((front, max(reach - size - front, 0)))
    if not any(map(any, pads)):
        return source.tensor, VALID
    same_padding = [
        same_pads(source.shape[2 + a], shape.kernel[a], shape.strides[a], shape.dilations[a]) for a in range(2)
    ]
    # A PAD copies the whole image, so it is written only if the kernels cannot pad this way themselves.
    if same_padding == pads and all(output_size[a] == -(-source.shape[2 + a] // shape.strides[a]) for a in range(2)):
        return source.tensor, SAME
    return pad(work, source.tensor, [(0, 0), *pads, (0, 0)], -np.inf if lowest else 0.0), VALID
