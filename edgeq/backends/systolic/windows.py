"""The windows of convolutions and poolings of the float model, as their attributes describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgeq.backends.systolic.program import Pads, Pair
from edgeq.graph.geometry import geometry
from edgeq.graph.query import attributes


@dataclass(frozen=True)
class Windows:
    """How windows lie on an image; pairs are (rows, columns).

    Attributes:
        pads: (top, left, bottom, right).
    """

    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: Pads

    @classmethod
    def of(cls, node: ir.Node, shape: tuple[int, ...], kernel: Pair | None = None) -> Windows:
        """The windows of a 2-D convolution or pooling, auto_pad worked out.

        Args:
            shape: of its input, [1, C, H, W].
            kernel: of a convolution, as its weights have it; else the attribute says.
        """
        kernel = kernel or _pair(attributes(node)["kernel_shape"])
        known = geometry(node, shape[2:], kernel)
        (top, bottom), (left, right) = known.pads
        return cls(kernel, _pair(known.strides), _pair(known.dilations), (top, left, bottom, right))

    @property
    def regular(self) -> bool:
        """Whether the array's convolution calls take them: square, equal strides, no dilation, four equal pads smaller
        than the kernel."""
        square = self.kernel[0] == self.kernel[1] and self.strides[0] == self.strides[1] and len(set(self.pads)) == 1
        return square and self.dilations == (1, 1) and self.pads[0] < self.kernel[0]

    def rounded_up(self, shape: tuple[int, ...]) -> Pair:
        """Rows and columns behind a pooling with ceil_mode; no window starts beyond the input and the padding before
        it."""
        found = []
        for axis in (0, 1):
            before, stride = shape[2 + axis] + self.pads[axis], self.strides[axis]
            extent = before + self.pads[2 + axis] - (self.kernel[axis] - 1) * self.dilations[axis] - 1
            steps = -(-extent // stride)
            found.append((steps if steps * stride < before else steps - 1) + 1)
        return found[0], found[1]

    def end_pads(self, shape: tuple[int, ...], size: tuple[int, ...]) -> Pair:
        """Padding at the bottom and right that an output of `size` rows and columns needs."""
        ends = []
        for axis in (0, 1):
            last = (size[axis] - 1) * self.strides[axis] + (self.kernel[axis] - 1) * self.dilations[axis] + 1
            ends.append(max(last - shape[2 + axis] - self.pads[axis], 0))
        return ends[0], ends[1]


def _pair(values: Sequence[int]) -> Pair:
    rows, columns = values
    return rows, columns
