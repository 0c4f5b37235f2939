"""Compute the integer operators of ONNX Runtime's CPU provider in numpy, to the last bit.

The function of each operator takes a node's inputs in order (None for an omitted input), and a function that multiplies
matrices exactly or with saturation. The operator's function returns the node's output. The arithmetic around the
product follows MLAS: sums and zero points in int32, scales in float32 from left to right, and rounding half to even
after clipping.

Kernels that add two products in 16 bits compute, for unsigned a and signed b,

    c[m, n] = sum over i of clip(a[m, 2i] b[2i, n] + a[m, 2i+1] b[2i+1, n], -2^15, 2^15 - 1)

on the raw bytes. Few pairs of weights can reach the limits of 16 bits, so only their sums are checked. The result is
the exact product minus the amounts by which these sums exceed 16 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.model.graph import (
    GraphIndex,
    KernelGeometry,
    constant,
    constant_tensor,
    geometry,
    is_depthwise,
    name_of,
    node_input,
    operator_of,
)
from edgeq.model.integer_products import integers
from edgeq.model.saturation import (
    PAIR_LIMIT,
    SaturatingPath,
    SaturationTable,
    as_pairs,
    conv_rows,
    pair_sums,
    possible_sums,
    saturation_table,
    with_even_channels,
)

_LOW, _HIGH = -(2**15), 2**15 - 1
# Products of bytes are below 2^16, so float32's 24 bits hold the sum of this many products exactly.
_EXACT_IN_FLOAT32 = 1 << 8
# OpenBLAS computes a product on one thread if it has at most 2^18 multiply-adds, or at most 2^13 if one factor is a
# vector. In larger products, its threads wait for each other in busy loops. With other work on the cores, this was
# measured to take 20 times the processor time.
_ONE_THREAD, _COLUMNS = 1 << 18, 1 << 5


@dataclass(frozen=True, eq=False)
class Product:
    """Hold a product of two matrices.

    Attributes:
        values: int64 [M, N].
        clipped: number of clipped sums of two products in each column; int64 [N].
        pairs: number of sums of two products in one column, over all rows.
        largest: for each column, the largest magnitude among the sums that may exceed 16 bits, judged by their weights;
            int64 [N]. It is 0 if there is no such sum, or if clipping is not checked.
    """

    values: NDArray[np.int64]
    clipped: NDArray[np.int64]
    pairs: int
    largest: NDArray[np.int64]


def multiply_exactly(a: NDArray[Any], b: NDArray[Any]) -> Product:
    """Return the product of signed or unsigned bytes [M, K] and [K, N], without saturation."""
    values = np.zeros((len(a), b.shape[1]), np.int64)
    # BLAS has fast float products but no integer ones, so the product is cut into parts that float32 holds exactly.
    for start in range(0, a.shape[1], _EXACT_IN_FLOAT32):
        part = slice(start, start + _EXACT_IN_FLOAT32)
        _add_product(values, a[:, part].astype(np.float32), b[part].astype(np.float32))
    nothing = np.zeros((2, b.shape[1]), np.int64)
    return Product(values, nothing[0], len(a) * ((a.shape[1] + 1) // 2), nothing[1])


def _add_product(values: NDArray[np.int64], a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    """Add a product to `values`, in parts so small that BLAS computes each on one thread."""
    rows = max(_ONE_THREAD // (max(a.shape[1], 1) * _COLUMNS), 1)
    for row in range(0, len(a), rows):
        for column in range(0, b.shape[1], _COLUMNS):
            across, along = slice(row, row + rows), slice(column, column + _COLUMNS)
            values[across, along] += np.matmul(a[across], b[:, along]).astype(np.int64)


def multiply_saturating(a: NDArray[np.uint8], b: NDArray[np.int8]) -> Product:
    """Return the product of unsigned [M, K] and signed [K, N], with each sum of two products clipped to 16 bits."""
    product, excess = _watch_product(a, b)
    return product if excess is None else replace(product, values=product.values - excess.T)


def multiply_watched(a: NDArray[np.uint8], b: NDArray[np.int8]) -> Product:
    """Return the exact product, with counts of the sums that `multiply_saturating` would clip."""
    return _watch_product(a, b)[0]


def _watch_product(a: NDArray[np.uint8], b: NDArray[np.int8]) -> tuple[Product, NDArray[np.int32] | None]:
    """Return the exact product, and the amount [N, M] that clipping would subtract; None if nothing can be clipped."""
    product = multiply_exactly(a, b)
    if not a.size or not (pair_sums(b.T) > PAIR_LIMIT).any():
        return product, None
    # Use one row for each k and for each n, so that values that are read together are next to each other in memory.
    activations = np.ascontiguousarray(a.T).astype(np.int32)
    if len(activations) % 2:
        activations = np.pad(activations, ((0, 1), (0, 0)))
    even_weights, odd_weights = as_pairs(b.T.astype(np.int32))
    suspects = _find_suspects(activations.max(axis=1), even_weights, odd_weights)
    excess = np.zeros((b.shape[1], len(a)), np.int32)
    # Few pairs can overflow, so a loop over them is faster than all sums at once.
    for i in np.flatnonzero(suspects.any(axis=0)):
        columns = np.flatnonzero(suspects[:, i])
        sums = activations[2 * i] * even_weights[columns, i, None]
        sums += activations[2 * i + 1] * odd_weights[columns, i, None]
        over = sums - np.clip(sums, _LOW, _HIGH)
        excess[columns] += over
        product.clipped[columns] += np.count_nonzero(over, axis=1)
        product.largest[columns] = np.maximum(product.largest[columns], np.abs(sums).max(axis=1))
    return product, excess


def _find_suspects(
    largest: NDArray[np.int32], even_weights: NDArray[Any], odd_weights: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return which pairs of weights can give sums outside 16 bits, if `largest` is the largest activation at each k."""
    even, odd = largest[0::2], largest[1::2]
    above = even * np.maximum(even_weights, 0) + odd * np.maximum(odd_weights, 0) > _HIGH
    return np.asarray(above | (even * np.minimum(even_weights, 0) + odd * np.minimum(odd_weights, 0) < _LOW))


def cut_windows(x: NDArray[Any], shape: KernelGeometry, padding: int) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return the windows of an image [N, C, *image] as [N, *out, taps, C], and the size of the output image.

    Args:
        padding: the value of the padding.
    """
    x = np.pad(x, ((0, 0), (0, 0), *shape.pads), constant_values=padding)
    sizes = tuple(
        (size - (taps - 1) * dilation - 1) // stride + 1
        for size, taps, dilation, stride in zip(x.shape[2:], shape.kernel, shape.dilations, shape.strides, strict=True)
    )
    channels_last = np.moveaxis(x, 1, -1)
    taps = []
    # One slice for each tap works for any stride, dilation and number of axes.
    for tap in itertools.product(*map(range, shape.kernel)):
        cut = tuple(
            slice(at * dilation, at * dilation + (size - 1) * stride + 1, stride)
            for at, dilation, size, stride in zip(tap, shape.dilations, sizes, shape.strides, strict=True)
        )
        taps.append(channels_last[(slice(None), *cut)])
    return np.stack(taps, axis=-2), sizes


Array = NDArray[Any]
Multiply = Callable[[Array, Array], Product]


@dataclass(frozen=True, eq=False)
class SumStats:
    """Record statistics of a layer's sums of two products.

    Attributes:
        sums: number of sums.
        clipped: number of clipped sums for each output channel.
        largest: for each output channel, the largest magnitude of a sum that can be clipped: see `Product`.
    """

    sums: int
    clipped: NDArray[np.int64]
    largest: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Computed:
    """Hold a layer's output, in the operator's dtype, and the statistics of its sums."""

    output: Array
    stats: SumStats


Operator = Callable[[ir.Node, Sequence[Array | None], Multiply], Computed]


def compute(node: ir.Node, inputs: Sequence[Array | None], multiply: Multiply, path: SaturatingPath) -> Computed:
    """Return the output of a node whose kernel is `path`, given its inputs in the node's order."""
    # Omitted inputs at the end are not in the list, and the operators' functions unpack a fixed number.
    padded = [*inputs, *[None] * (12 - len(inputs))]
    # This kernel multiplies the weights from the left, so the roles of rows and columns change.
    if path.swapped:
        return _conv_integer(node, padded, multiply)
    if node.op_type == "QLinearConv":
        return _qlinear_conv(node, padded, multiply, path)
    return OPERATORS[node.op_type](node, padded, multiply)


def sum_matmul(
    a: Array, b: Array, a_zero: Array | None, b_zero: Array | None, multiply: Multiply
) -> tuple[Array, SumStats]:
    """Return int64 sums of (a - a_zero)(b - b_zero), stacked as in numpy.matmul. `multiply` multiplies raw bytes."""
    a, b = np.asarray(a), np.asarray(b)
    lone_row, lone_column = a.ndim == 1, b.ndim == 1
    a, b = (a[None] if lone_row else a), (b[:, None] if lone_column else b)
    if b.ndim == 2:
        stack, rows = a.shape[:-1], a.reshape(1, -1, a.shape[-1])
        columns = b[None]
    else:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        stack = (*batch, a.shape[-2])
        rows = np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(-1, *a.shape[-2:])
        columns = np.broadcast_to(b, (*batch, *b.shape[-2:])).reshape(-1, *b.shape[-2:])
    products = [multiply(row_block, column_block) for row_block, column_block in zip(rows, columns, strict=True)]
    values = np.stack([product.values for product in products]).reshape(*stack, b.shape[-1])
    a_offset, b_offset = _read_zero(a_zero), _read_zero(b_zero)
    if a_offset.ndim:
        a_offset = a_offset[..., None] if a_offset.shape[-1:] != (1,) else a_offset
    # The zero points are subtracted from the sums, as the kernels do, because clipping works on the raw bytes.
    if a_offset.any():
        values = values - a_offset * b.astype(np.int64).sum(-2, keepdims=True)
    if b_offset.any():
        values = values - (a.astype(np.int64).sum(-1, keepdims=True) - a.shape[-1] * a_offset) * b_offset
    if lone_row:
        values = values[..., 0, :]
    if lone_column:
        values = values[..., 0]
    largest = np.max([p.largest for p in products], axis=0)
    return values, SumStats(
        sum(p.pairs for p in products) * b.shape[-1], np.asarray(sum(p.clipped for p in products)), largest
    )


def sum_conv(
    node: ir.Node,
    x: Array,
    w: Array,
    x_zero: Array | None,
    w_zero: Array | None,
    multiply: Multiply,
    path: SaturatingPath | None = None,
) -> tuple[Array, SumStats]:
    """Return int64 sums of a convolution, [N, cout, *out]. Index k runs over taps, then channels.

    Args:
        path: the kernel, which affects which products are neighbours and which sums saturate; None ignores both.
    """
    shape = geometry(node, x.shape[2:], w.shape[2:])
    zero = int(_read_zero(x_zero).ravel()[0])
    if path is not None and path.evens(shape.group):
        # The added channel has zero weights and values equal to the zero point.
        x, w = with_even_channels(x, zero, group=shape.group), with_even_channels(w)
    if path is not None and path.exact_padding and zero and any(map(any, shape.pads)):
        # The kernel adds the padding exactly, so its part of the sum is computed apart and added.
        outside = 1 - np.pad(np.ones_like(x), ((0, 0), (0, 0), *shape.pads))
        inside = np.pad(x, ((0, 0), (0, 0), *shape.pads))
        unpadded = replace(shape, pads=tuple((0, 0) for _ in shape.pads))
        values, stats = _sum_windows(unpadded, inside, w, x_zero, w_zero, multiply)
        return values + zero * _sum_windows(unpadded, outside, w, None, w_zero, multiply_exactly)[0], stats
    return _sum_windows(shape, x, w, x_zero, w_zero, multiply)


def _sum_windows(
    shape: KernelGeometry, x: Array, w: Array, x_zero: Array | None, w_zero: Array | None, multiply: Multiply
) -> tuple[Array, SumStats]:
    view, sizes = cut_windows(x, shape, int(_read_zero(x_zero).ravel()[0]))
    channels, outs = x.shape[1] // shape.group, len(w) // shape.group
    w_offset = np.broadcast_to(_read_zero(w_zero), len(w))
    parts, all_stats = [], []
    for group in range(shape.group):
        rows = view[..., group * channels : (group + 1) * channels]
        rows = rows.reshape(-1, rows.shape[-2] * channels)
        group_outputs = slice(group * outs, (group + 1) * outs)
        kernel = np.moveaxis(w[group_outputs], 1, -1).reshape(outs, -1).T
        part, stats = sum_matmul(rows, kernel, x_zero, w_offset[group_outputs], multiply)
        parts.append(part)
        all_stats.append(stats)
    values = np.concatenate(parts, axis=1).reshape(len(x), *sizes, len(w))
    clipped, largest = (np.concatenate([getattr(t, name) for t in all_stats]) for name in ("clipped", "largest"))
    return np.moveaxis(values, -1, 1), SumStats(sum(t.sums for t in all_stats), clipped, largest)


def requantize(sums: Array, scale: Array, zero_point: Array) -> Array:
    """Return int32 sums as bytes of `zero_point`'s type: multiplied in float32, clipped, rounded half to even."""
    levels, zero = np.iinfo(zero_point.dtype), int(zero_point.ravel()[0])
    # Float32, not float64: the rounding of this product is part of the result's last bit.
    scaled = _wrap_int32(sums).astype(np.float32) * scale.astype(np.float32)
    clipped = np.clip(scaled, np.float32(levels.min - zero), np.float32(levels.max - zero))
    return (np.rint(clipped).astype(np.int32) + zero).astype(zero_point.dtype)


def quantize_dynamically(x: Array) -> tuple[Array, np.float32, Array]:
    """Return float32 values as unsigned bytes, with their scale and zero point, as DynamicQuantizeLinear does."""
    # Zero is always in the range, so that padding and zeros are exact.
    low, high = np.float32(min(x.min(initial=0), 0)), np.float32(max(x.max(initial=0), 0))
    scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(255))
    zero = np.uint8(np.rint(np.clip(-low / scale, np.float32(0), np.float32(255))))
    steps = np.rint(np.clip(x / scale, -np.float32(zero), np.float32(255) - np.float32(zero)))
    return (steps + zero).astype(np.uint8), scale, np.asarray(zero)


def _matmul_integer(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    a, b, a_zero, b_zero = inputs[:4]
    values, stats = sum_matmul(a, b, a_zero, b_zero, multiply)
    return Computed(_wrap_int32(values), stats)


def _qlinear_matmul(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs[:8]
    values, stats = sum_matmul(a, b, a_zero, b_zero, multiply)
    return Computed(
        requantize(values, _flatten_scale(a_scale) * _flatten_scale(b_scale) / _flatten_scale(y_scale), y_zero), stats
    )


def _matmul_integer_to_float(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    a, b, a_scale, b_scale, a_zero, b_zero, bias = inputs[:7]
    values, stats = sum_matmul(a, b, a_zero, b_zero, multiply)
    return Computed(_scale_sums(values, _flatten_scale(a_scale) * _flatten_scale(b_scale), bias), stats)


def _dynamic_matmul(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    x, b, b_scale, b_zero, bias = inputs[:5]
    a, scale, zero = quantize_dynamically(x)
    values, stats = sum_matmul(a, b, zero, b_zero, multiply)
    return Computed(_scale_sums(values, scale * _flatten_scale(b_scale), bias), stats)


def _qgemm(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = inputs[:9]
    a, b = (a.T if node.attributes.get_int("transA", 0) else a), (b.T if node.attributes.get_int("transB", 0) else b)
    values, stats = sum_matmul(a, b, a_zero, b_zero, multiply)
    if c is not None:
        values = values + c
    alpha = np.float32(node.attributes.get_float("alpha", 1.0))
    scale = alpha * _flatten_scale(a_scale) * _flatten_scale(b_scale)
    if y_scale is None:
        return Computed(_scale_sums(values, scale, None), stats)
    return Computed(requantize(values, scale / _flatten_scale(y_scale), y_zero), stats)


def _qlinear_conv(node: ir.Node, inputs: Sequence[Any], multiply: Multiply, path: SaturatingPath | None) -> Computed:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = inputs[:9]
    channels_last = node.attributes.get_int("channels_last", 0)
    values, stats = sum_conv(node, np.moveaxis(x, -1, 1) if channels_last else x, w, x_zero, w_zero, multiply, path)
    spread = (-1, *[1] * (values.ndim - 2))
    if bias is not None:
        values = values + bias.reshape(spread)
    scale = (_flatten_scale(x_scale) * _flatten_scale(w_scale) / _flatten_scale(y_scale)).reshape(spread)
    output = requantize(values, scale, y_zero)
    return Computed(np.ascontiguousarray(np.moveaxis(output, 1, -1)) if channels_last else output, stats)


def _conv_integer(node: ir.Node, inputs: Sequence[Any], multiply: Multiply) -> Computed:
    x, w, x_zero, w_zero = inputs[:4]
    shape = geometry(node, x.shape[2:], w.shape[2:])
    view, sizes = cut_windows(x, shape, int(_read_zero(x_zero).ravel()[0]))
    channels, outs = x.shape[1] // shape.group, len(w) // shape.group
    images, sums = [], 0
    nothing = np.zeros((2, len(w)), np.int64)
    # The kernel works on one image at a time, which decides the neighbours in a pair.
    for image in view:
        parts = []
        for group in range(shape.group):
            group_outputs = slice(group * outs, (group + 1) * outs)
            columns = np.moveaxis(image[..., group * channels : (group + 1) * channels], -1, -2)
            columns = columns.reshape(int(np.prod(sizes)), -1).T
            part, stats = sum_matmul(w[group_outputs].reshape(outs, -1), columns, w_zero, x_zero, multiply)
            parts.append(part.reshape(outs, *sizes))
            sums += stats.sums
        images.append(np.concatenate(parts))
    return Computed(_wrap_int32(np.stack(images)), SumStats(sums, *nothing))


OPERATORS: Mapping[str, Operator] = {
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _qlinear_matmul,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "QGemm": _qgemm,
}


def _scale_sums(values: Array, scale: Array, bias: Array | None) -> Array:
    numbers = _wrap_int32(values).astype(np.float32) * scale
    return numbers if bias is None else numbers + bias.astype(np.float32)


def _wrap_int32(values: Array) -> Array:
    """Return sums wrapped around to 32 bits, as in a register."""
    return values.astype(np.int64).astype(np.int32)


def _read_zero(zero_point: Array | None) -> NDArray[np.int64]:
    return np.zeros((), np.int64) if zero_point is None else np.asarray(zero_point).astype(np.int64)


def _flatten_scale(scale: Array) -> Array:
    scale = np.asarray(scale, np.float32)
    return scale.reshape(()) if scale.size == 1 else scale


_TYPES = {ir.DataType.UINT8: "uint8", ir.DataType.INT8: "int8"}


@dataclass(frozen=True, eq=False)
class SaturatingLayer:
    """Describe one node on a saturating path.

    Attributes:
        node: the node in the optimised graph.
        path: the kernel that computes the node.
        rows: the constant weight as [output channels, K] in the order of k; None if the weight is computed, or is not a
            single matrix.
        channels: number of input channels that one output reads; 0 for nodes that are not convolutions.
    """

    node: ir.Node
    path: SaturatingPath
    rows: NDArray[Any] | None
    channels: int = 0

    @property
    def pair_sums(self) -> NDArray[Any] | None:
        """Return `edgeq.model.saturation.pair_sums` of `rows`, over all pairs of weights that the kernels may form."""
        if self.rows is None:
            return None
        return possible_sums(self.rows, self.channels) if self.path.any_neighbours else pair_sums(self.rows)

    @property
    def name(self) -> str:
        """Return the node's name, or its output's name if it has none."""
        return self.node.name or name_of(self.node.outputs[0])

    @property
    def suspects(self) -> NDArray[np.bool_] | None:
        """Return, for each output channel, whether it can saturate for some input; None if the weight is unknown."""
        sums = self.pair_sums
        return None if sums is None else np.asarray((sums > PAIR_LIMIT).any(axis=1))

    def compute(
        self, inputs: Sequence[NDArray[Any] | None], *, saturating: bool = True, watched: bool = False
    ) -> Computed:
        """Compute the layer's output from its inputs, in the node's order.

        Args:
            watched: whether to count sums that would have been clipped. It is ignored if `saturating` is True.
        """
        exact = multiply_watched if watched else multiply_exactly
        return compute(self.node, inputs, multiply_saturating if saturating else exact, self.path)


def find_layers(
    graph: GraphIndex, config: Mapping[str, str], table: SaturationTable | None = None
) -> tuple[SaturatingLayer, ...]:
    """Return every node of an optimised graph on a saturating path.

    Args:
        config: session options that the model runs with. One option, if it is set, makes kernels exact.
        table: the kernels that saturate; None means ONNX Runtime's own.
    """
    table = table or saturation_table()
    precise = table.precision_operators if config.get(table.precision_option) == "1" else frozenset()
    layers = []
    for node in graph.graph:
        row = operator_of(node)
        if not row.integers or row.weight is None:
            continue
        activation = "uint8" if row.dynamic else _find_dtype(*integers(node, 0))
        path = table.path(node.op_type, activation, _find_dtype(*integers(node, row.weight)))
        array = constant(node_input(node, row.weight))
        # With this option, these kernels are exact.
        if path is None or (array is not None and node.op_type in precise):
            continue
        # This kernel computes depthwise convolutions exactly.
        if path.exact_depthwise and array is not None and is_depthwise(node, array.shape):
            continue
        channels = array.shape[1] if array is not None and "Conv" in node.op_type else 0
        layers.append(SaturatingLayer(node, path, None if array is None else _order_rows(node, array, path), channels))
    return tuple(layers)


def _find_dtype(*values: ir.Value | None) -> str:
    """Return the type of a tensor's bytes, known from the tensor or its zero point; "" if neither has a known type."""
    for value in values:
        tensor = constant_tensor(value)
        dtype = tensor.dtype if tensor is not None else value.dtype if value is not None else None
        if dtype in _TYPES:
            return _TYPES[dtype]
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type == "DynamicQuantizeLinear":
            return "uint8"
    return ""


def _order_rows(node: ir.Node, weight: NDArray[Any], path: SaturatingPath) -> NDArray[Any] | None:
    if node.op_type in ("QLinearConv", "ConvInteger"):
        return conv_rows(weight, path.order)
    # edgeq does not know the order of k there, so neighbouring weights say nothing.
    if not path.modelled or weight.ndim < 2:
        return None
    if weight.ndim > 2:  # a stack of matrices has one row for every column of every matrix
        return np.moveaxis(weight, -2, -1).reshape(-1, weight.shape[-2])
    transposed = node.op_type == "QGemm" and node.attributes.get_int("transB", 0) == 1
    return weight if transposed else weight.T
