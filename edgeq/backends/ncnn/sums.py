"""Write float depthwise convolutions and global means with the sums of ncnn's kernels for ARM.

float32 sums depend on their order, and on whether a product is rounded before it is added. If a sum differs in the last
bit, a later int8 layer may round it to another integer. ncnn's kernels for four channels at once add as follows; each
rule was measured on random numbers, one output at a time (docs/reference/ncnn.md):

- 3 x 3 with stride 1: rows in pairs. The first row of a pair adds the rows of the kernel in the order 2, 3, 1, the
  second row in the order 1, 2, 3, both with fused multiply-adds. A last row without a partner is computed by columns.
- by columns, and 3 x 3 with stride 2: groups of four columns with fused multiply-adds in order. Then a group of two, in
  which even and odd elements of the kernel have a sum each. Then a single column, whose products are rounded.
- all other kernels: in order, with rounded products.
- a global mean: in order, times the rounded 1 / size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.edit import Editor, replace_node
from edgeq.model.graph import KernelGeometry, constant, geometry, is_op, name_of, node_input

# The kernels compute this many channels at once. Single channels are added in another order.
_CHANNELS = 4
# Larger kernels and images would make graphs of thousands of nodes.
_MOST_ELEMENTS = 256
_IN_PAIRS, _BY_COLUMNS = ((3, 3), (1, 1)), ((3, 3), (2, 2))
_COLUMNS = (4, 2, 1)


def write_ordered_sums(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Replace the float depthwise convolutions and global means of a model for which the order of sums is known, in
    place.

    Args:
        shapes: sizes of the tensors at batch size 1, by name.

    Returns:
        The number of nodes that were replaced.
    """
    editor, count = Editor(model), 0
    for node in list(model.graph):
        source, output = (shapes.get(name_of(value)) for value in (node.inputs[0], node.outputs[0]))
        if source is None or output is None:
            continue
        if is_op(node, "GlobalAveragePool") and int(np.prod(source[2:])) <= _MOST_ELEMENTS:
            replace_node(node, _write_mean(node, source, editor))
            count += 1
        elif is_op(node, "Conv") and (layer := _depthwise(node, source, output, editor)) is not None:
            replace_node(node, layer.write())
            count += 1
    return count


def _write_mean(node: ir.Node, shape: tuple[int, ...], editor: Editor) -> ir.Value:
    write = _writer(node, editor)
    size = int(np.prod(shape[2:]))
    flat = write("Reshape", [node.inputs[0], write.number(np.array([0, shape[1], -1], np.int64))])
    axis = write.number(np.array([2], np.int64))
    total: ir.Value | None = None
    for place in range(size):
        ends = [write.number(np.array([end], np.int64)) for end in (place, place + 1)]
        element = write("Slice", [flat, *ends, axis])
        total = element if total is None else write("Add", [total, element])
    mean = write("Mul", [total, write.number(np.array(np.float32(1) / np.float32(size)))])
    ones = np.array([0, shape[1], *[1] * (len(shape) - 2)], np.int64)
    return write("Reshape", [mean, write.number(ones)])


@dataclass(frozen=True)
class _NodeWriter:
    """Write nodes before another node, with names derived from its name."""

    node: ir.Node
    editor: Editor

    def __call__(self, kind: str, inputs: Sequence[ir.Value | None], **attributes: object) -> ir.Value:
        name = f"{self.node.name}/{kind}"
        return self.editor.node(kind, inputs, name, before=self.node, attributes=attributes)

    def number(self, values: NDArray[np.generic]) -> ir.Value:
        """Return a constant."""
        return self.editor.constant(f"{self.node.name}/number", values)


def _writer(node: ir.Node, editor: Editor) -> _NodeWriter:
    return _NodeWriter(node, editor)


@dataclass(frozen=True)
class _Region:
    """Describe a part of the output: `count` rows from `first` on, `step` apart, and the same for columns."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Depthwise:
    """Hold a depthwise convolution: its weights [channels, elements], its bias [channels], and its padded input."""

    write_node: _NodeWriter
    source: ir.Value
    weights: NDArray[np.float32]
    bias: NDArray[np.float32]
    shape: KernelGeometry
    size: tuple[int, int]

    def write(self) -> ir.Value:
        """Write the sums of all parts of the output, and return the output."""
        rows, columns = self.size
        kind = self.shape.kernel, self.shape.strides
        if set(self.shape.dilations) != {1} or kind not in (_IN_PAIRS, _BY_COLUMNS):
            return self._rounded(_Region((0, rows, 1), (0, columns, 1)))
        if kind == _BY_COLUMNS:
            return self._by_columns((0, rows, 1))
        pairs, parts = rows // 2, []
        if pairs:
            width = (0, columns, 1)
            first = self._fused(_Region((0, pairs, 2), width), (3, 4, 5, 6, 7, 8, 0, 1, 2))
            second = self._fused(_Region((1, pairs, 2), width), range(9))
            parts.append(self._interleaved(first, second, pairs))
        if rows % 2:
            parts.append(self._by_columns((rows - 1, 1, 1)))
        return self._joined(parts, 2)

    def _by_columns(self, rows: tuple[int, int, int]) -> ir.Value:
        widths, start = self.size[1], 0
        sums: Mapping[int, Callable[[_Region], ir.Value]] = {
            4: lambda region: self._fused(region, range(9)),
            2: self._in_two,
            1: self._rounded,
        }
        parts = []
        for width in _COLUMNS:
            count = (widths - start) // width * width
            if count:
                parts.append(sums[width](_Region(rows, (start, count, 1))))
            start += count
        return self._joined(parts, 3)

    def _fused(self, region: _Region, order: Sequence[int], start: ir.Value | None = None) -> ir.Value:
        """Add the elements of the kernel in `order` to `start` or to the bias, with one rounding for each."""
        write, total = self.write_node, start
        # Products of float32 numbers are exact in float64, so the cast of the sum is its only rounding.
        for element in order:
            wide = write("Cast", [self._taken(region, element)], to=ir.DataType.DOUBLE)
            product = write("Mul", [wide, self._spread(self.weights[:, element].astype(np.float64))])
            if total is None:
                added = self._spread(self.bias.astype(np.float64))
            else:
                added = write("Cast", [total], to=ir.DataType.DOUBLE)
            total = write("Cast", [write("Add", [product, added])], to=ir.DataType.FLOAT)
        assert total is not None
        return total

    def _in_two(self, region: _Region) -> ir.Value:
        """Add even elements to the bias and odd ones to each other, and then both sums."""
        elements = range(self.weights.shape[1])
        odd = self._fused(region, elements[3::2], self._product(region, 1))
        return self.write_node("Add", [self._fused(region, elements[::2]), odd])

    def _rounded(self, region: _Region) -> ir.Value:
        """Add rounded products to the bias in order."""
        total = self._spread(self.bias)
        for element in range(self.weights.shape[1]):
            total = self.write_node("Add", [total, self._product(region, element)])
        return total

    def _product(self, region: _Region, element: int) -> ir.Value:
        return self.write_node("Mul", [self._taken(region, element), self._spread(self.weights[:, element])])

    def _taken(self, region: _Region, element: int) -> ir.Value:
        """Return the inputs by which an element of the kernel is multiplied."""
        ends = []
        places = divmod(element, self.shape.kernel[1])
        for axis, (first, count, step) in enumerate((region.rows, region.columns)):
            stride = self.shape.strides[axis]
            begin = places[axis] * self.shape.dilations[axis] + first * stride
            ends.append((begin, begin + (count - 1) * step * stride + 1, step * stride))
        begins, stops, steps = (np.array(column, np.int64) for column in zip(*ends, strict=True))
        numbers = [self.write_node.number(n) for n in (begins, stops, np.array([2, 3], np.int64), steps)]
        return self.write_node("Slice", [self.source, *numbers])

    def _interleaved(self, first: ir.Value, second: ir.Value, pairs: int) -> ir.Value:
        """Return the rows of two tensors in turn."""
        write, channels, columns = self.write_node, len(self.bias), self.size[1]
        split = write.number(np.array([0, channels, pairs, 1, columns], np.int64))
        both = write("Concat", [write("Reshape", [value, split]) for value in (first, second)], axis=3)
        return write("Reshape", [both, write.number(np.array([0, channels, 2 * pairs, columns], np.int64))])

    def _joined(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        return parts[0] if len(parts) == 1 else self.write_node("Concat", parts, axis=axis)

    def _spread(self, numbers: NDArray[np.floating]) -> ir.Value:
        return self.write_node.number(numbers.reshape(1, -1, 1, 1))


def _depthwise(node: ir.Node, source: tuple[int, ...], output: tuple[int, ...], editor: Editor) -> _Depthwise | None:
    """Return the convolution that a node computes, with its padding written. Return None if it is not depthwise, or if
    the order of its sums is not known.
    """
    weights, bias_value = constant(node.inputs[1]), node_input(node, 2)
    bias = constant(bias_value) if bias_value is not None else None
    if weights is None or (bias_value is not None and bias is None) or weights.ndim != 4 or len(source) != 4:
        return None
    channels, inputs, *kernel = weights.shape
    known = inputs == 1 and node.attributes.get_int("group", 1) == channels == source[1] and not channels % _CHANNELS
    if not known or np.prod(kernel) > _MOST_ELEMENTS:
        return None
    shape, write = geometry(node, source[2:], tuple(kernel)), _writer(node, editor)
    value = node.inputs[0]
    assert value is not None
    if any(map(any, shape.pads)):
        (top, bottom), (left, right) = shape.pads
        value = write("Pad", [value, write.number(np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))])
    start = np.zeros(channels, np.float32) if bias is None else bias.astype(np.float32)
    flat = weights.reshape(channels, -1).astype(np.float32)
    return _Depthwise(write, value, flat, start, shape, (output[2], output[3]))
