"""Layers with constant weights as what they are: a matrix times patches of their input, for each group of channels.

Conv, Gemm and MatMul all compute  y[g, m] = sum_k W[g, m, k] x[g, k] + b[g, m]  at every position, where x[g] is what
one output position reads of the input: channels of the group times kernel for a Conv, one row for Gemm and MatMul.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """A node with constant weights.

    Attributes:
        name, op_type: of the node.
        source, output: the tensors that it reads and makes.
        weight, bias: initializers; `bias` is "" where there is none.
        shape: of the weight.
        groups: 1 but for a grouped Conv.
        transposed: whether the weight is stored as [k, m] (MatMul, and Gemm without transB).
        attributes: of the node.
    """

    name: str
    op_type: str
    source: str
    output: str
    weight: str
    bias: str
    shape: tuple[int, ...]
    groups: int
    transposed: bool
    attributes: Mapping[str, Any]

    @property
    def outputs(self) -> int:
        """Output channels, over all groups."""
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def taps(self) -> int:
        """Length k of one patch."""
        return self.shape[0] if self.transposed else math.prod(self.shape[1:])

    @property
    def channel_axis(self) -> int:
        """Of the output's channels, among the axes of the output."""
        return 1 if self.op_type == "Conv" else -1

    def rows(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight as [groups, outputs per group, taps]."""
        flat = weight.T if self.transposed else weight
        return flat.reshape(self.groups, self.outputs // self.groups, self.taps)

    def unrows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `rows`."""
        flat = rows.reshape(self.outputs, self.taps)
        return np.ascontiguousarray(flat.T) if self.transposed else flat.reshape(self.shape)

    def patches(self, values: NDArray[Any], limit: int, random: np.random.Generator) -> NDArray[np.float32]:
        """What output positions read of an input tensor.

        Args:
            values: the tensor `source`, batch included.
            limit: positions at most; more are drawn from, without repetition.

        Returns:
            float32 [groups, positions, taps].
        """
        if self.op_type == "Conv":
            return self._windows(values, limit, random)
        table = values.reshape(-1, values.shape[-1])
        if len(table) > limit:
            table = table[random.choice(len(table), limit, replace=False)]
        return table[None].astype(np.float32)

    def _windows(self, values: NDArray[Any], limit: int, random: np.random.Generator) -> NDArray[np.float32]:
        kernel = self.shape[2:]
        strides, dilations, pads = conv_geometry(self.attributes, kernel, values.shape[2:])
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
        padded = [size + before + after for size, (before, after) in zip(values.shape[2:], pads, strict=True)]
        sizes = [(p - r) // s + 1 for p, r, s in zip(padded, reach, strides, strict=True)]
        batch, channels = values.shape[:2]
        total = batch * math.prod(sizes)
        chosen = np.arange(total) if total <= limit else random.choice(total, limit, replace=False)
        image, *places = np.unravel_index(chosen, (batch, *sizes))
        values = np.pad(values, [(0, 0), (0, 0), *pads])
        index = []
        for axis, place in enumerate(places):
            offsets = np.arange(kernel[axis]) * dilations[axis]
            grid = place[:, None] * strides[axis] + offsets
            index.append(grid.reshape(len(chosen), *(kernel[axis] if a == axis else 1 for a in range(len(kernel)))))
        image = image.reshape(-1, *[1] * len(kernel))
        # Advanced indices around a slice put the slice last: [positions, kernel..., channels].
        where: tuple[Any, ...] = (image, slice(None), *index)
        taken = np.moveaxis(values[where], -1, 1)
        grouped = taken.reshape(len(chosen), self.groups, self.taps)
        assert channels * math.prod(kernel) == self.groups * self.taps
        return np.ascontiguousarray(grouped.transpose(1, 0, 2), np.float32)


def conv_geometry(
    attributes: Mapping[str, Any], kernel: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(strides, dilations, padding before and after each axis) of a Conv on an input of these spatial sizes.

    Padding by auto_pad follows the definition of ONNX's Conv: SAME keeps ceil(size / stride) outputs, the odd one goes
    to the end (UPPER) or the beginning (LOWER).
    """
    dims = len(kernel)
    strides = list(attributes.get("strides", [1] * dims))
    dilations = list(attributes.get("dilations", [1] * dims))
    auto = attributes.get("auto_pad", b"NOTSET").decode()
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
            whole = max(0, (math.ceil(size / s) - 1) * s + d * (k - 1) + 1 - size)
            less, more = whole // 2, whole - whole // 2
            pads.append((less, more) if auto == "SAME_UPPER" else (more, less))
        return strides, dilations, pads
    flat = list(attributes.get("pads", [0] * 2 * dims)) if auto == "NOTSET" else [0] * 2 * dims
    return strides, dilations, list(zip(flat[:dims], flat[dims:], strict=True))


def find_layers(model: onnx.ModelProto) -> tuple[Layer, ...]:
    """The main graph's layers with constant float weights, in the order of the graph.

    Left out are a Gemm with transA, alpha, beta or a bias that differs from row to row, and a MatMul whose weight is
    not a matrix.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or node.domain not in ("", "ai.onnx") or len(node.input) < 2:
            continue
        weight = constants.get(node.input[1])
        if weight is None or weight.data_type != onnx.TensorProto.FLOAT or node.input[0] in constants:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = not attributes.get("transA") and attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
        if not plain or (node.op_type != "Conv" and len(weight.dims) != 2):
            continue
        bias = node.input[2] if len(node.input) > 2 else ""
        if bias and bias not in constants:
            continue
        layer = Layer(
            node.name,
            node.op_type,
            node.input[0],
            node.output[0],
            node.input[1],
            bias,
            tuple(weight.dims),
            attributes.get("group", 1),
            node.op_type == "MatMul" or (node.op_type == "Gemm" and not attributes.get("transB")),
            attributes,
        )
        if not bias or _per_output(constants[bias].dims, layer.outputs):
            found.append(layer)
    return tuple(found)


def _per_output(dims: Sequence[int], outputs: int) -> bool:
    """Whether a bias has one number for each output, or one for all."""
    return math.prod(dims) == 1 or (math.prod(dims) == outputs and dims[-1] == outputs)
