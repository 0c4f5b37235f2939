"""Write convolutions and matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.litert.layout import model_order
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import BIAS_TYPES, Scales, TfliteTensor
from edgeq.backends.litert.operators.slicing import SLICING, slices
from edgeq.backends.litert.operators.windows import (
    SAME,
    VALID,
    dilations,
    image,
    image_size,
    same_pads,
    strides,
    window,
    with_padding,
    write_image,
)
from edgeq.model.graph import name_of, node_input


def write_conv(work: Lowering, node: ir.Node) -> None:
    """Write CONV_2D or DEPTHWISE_CONV_2D."""
    source = image(work, node)
    weights, weight_scales = _weights(work, node.inputs[1], 0)
    shape = window(node, source, weights.shape[2:])
    # The kernel of a sequence gets a row axis of size 1, like its image.
    weights = weights.reshape(*weights.shape[:2], *shape.kernel)
    padded, padding = with_padding(work, node, source, shape)
    bias = _bias(work, node, source, weight_scales, weights.shape[0])
    options: dict[str, Any] = {"padding": padding, **strides(shape), **dilations(shape)}
    channels = source.shape[1]
    # A single channel with several kernels is an ordinary convolution of one channel.
    if shape.group == channels and weights.shape[1] == 1 and (shape.group > 1 or weights.shape[0] == 1):
        moved = weights.transpose(1, 2, 3, 0)
        kernel = work.fixed(name_of(node.inputs[1]), moved, _on_axis(weight_scales, 3))
        options["depthMultiplier"] = weights.shape[0] // channels
        write_image(work, node, "DEPTHWISE_CONV_2D", (padded, kernel, bias), options)
        return
    kernel = work.fixed(name_of(node.inputs[1]), weights.transpose(0, 2, 3, 1), _on_axis(weight_scales, 0))
    write_image(work, node, "CONV_2D", (padded, kernel, bias), options)


def write_conv_transpose(work: Lowering, node: ir.Node) -> None:
    """Write TRANSPOSE_CONV. If the node's pads match neither SAME nor VALID, add a slice."""
    source = image(work, node)
    weights, weight_scales = _weights(work, node.inputs[1], 1)
    shape = window(node, source, weights.shape[2:])
    weights = weights.reshape(*weights.shape[:2], *shape.kernel)
    if shape.group != 1 or shape.dilations != (1, 1):
        raise CannotWriteError("it has groups or dilations, which TRANSPOSE_CONV does not support")
    kernel = work.fixed(name_of(node.inputs[1]), weights.transpose(1, 2, 3, 0), _on_axis(weight_scales, 0))
    bias = _bias(work, node, source, weight_scales, weights.shape[1])
    n, c, *_ = work.sizes(node.outputs[0])
    output_size, axes = image_size(work, node), range(2)
    full = [(source.shape[2 + a] - 1) * shape.strides[a] + shape.kernel[a] for a in axes]
    cut = [(shape.pads[a][0], shape.pads[a][0] + output_size[a]) for a in axes]
    # SAME of a transposed convolution is that of the convolution which it reverses, from its output to its input.
    same_padding = [same_pads(shape.strides[a] * source.shape[2 + a], shape.kernel[a], shape.strides[a]) for a in axes]
    options: dict[str, Any] = {"padding": VALID, **strides(shape)}
    is_same = all(
        output_size[a] == shape.strides[a] * source.shape[2 + a] and same_padding[a][0] == shape.pads[a][0]
        for a in axes
    )
    if is_same or cut == [(0, size) for size in full]:
        options["padding"] = SAME if is_same else VALID
        size = work.fixed("shape", np.array([n, *output_size, c], np.int32))
        write_image(work, node, "TRANSPOSE_CONV", (size, kernel, source.tensor, bias), options)
        return
    # Rows beyond the kernel's reach would be the bias alone, which no slice can make.
    if any(end > size for (_, end), size in zip(cut, full, strict=True)):
        raise CannotWriteError(f"its output_padding reaches beyond what its kernel makes, {full}")
    size = work.fixed("shape", np.array([n, *full, c], np.int32))
    scales = work.parameters(node)
    # The uncut output has the same scale, so the slice moves integers.
    wide = work.partial(f"{node.outputs[0].name}/uncut", (n, *full, c), scales)
    work.emit("TRANSPOSE_CONV", (size, kernel, source.tensor, bias), wide, options)
    ends = [(0, n), *cut, (0, c)]
    write_image(work, node, "STRIDED_SLICE", (wide, *slices(work, ends, [1] * 4)), SLICING, like=wide)


def write_gemm(work: Lowering, node: ir.Node) -> None:
    """Write FULLY_CONNECTED."""
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    # Preparation has folded constant factors into the weights, so what is left cannot be.
    if (alpha, beta, node.attributes.get_int("transA", 0)) != (1, 1, 0):
        raise CannotWriteError("its alpha or beta is not 1, or it transposes its input")
    _fully_connected(work, node, transposed_weights=bool(node.attributes.get_int("transB", 0)))


def write_matmul(work: Lowering, node: ir.Node) -> None:
    """Write FULLY_CONNECTED for a constant matrix, or BATCH_MATMUL for two activations."""
    if work.is_constant(node.inputs[1]) and len(work.sizes(node.inputs[1])) == 2:
        _fully_connected(work, node, transposed_weights=False)
        return
    # The kernel takes a constant on the right only, and both sides in one type.
    if work.integer and work.is_constant(node.inputs[0]):
        raise CannotWriteError("its left matrix is constant")
    if work.integer and work.stored(node.inputs[1]).tensor.type != work.type:
        raise CannotWriteError("its right matrix has integers of another type")
    lhs, rhs = (_in_plain_order(work, value) for value in node.inputs[:2])
    rank, output = max(len(lhs.shape), len(rhs.shape), 2), node.outputs[0]
    rows, columns = lhs.shape[-2:-1], rhs.shape[-1:] if len(rhs.shape) > 1 else ()
    # In a product, a vector on the left is a row, and a vector on the right is a column.
    rhs = work.as_shape(rhs, rhs.shape if columns else (*rhs.shape, 1), f"{name_of(output)}/column")
    lhs, rhs = (
        work.as_shape(side, (*[1] * (rank - len(side.shape)), *side.shape), f"{side.tensor.name}/raised")
        for side in (lhs, rhs)
    )
    lhs, rhs = (work.arranged(side, model_order(rank)) for side in (lhs, rhs))
    options = {"adjX": False, "adjY": False}
    if rows and columns:
        work.write(node, "BATCH_MATMUL", (lhs.tensor, rhs.tensor), model_order(rank), options)
        return
    shape = (*np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2]), *(rows or (1,)), *(columns or (1,)))
    product = work.partial(f"{name_of(output)}/product", shape, work.parameters(node))
    work.emit("BATCH_MATMUL", (lhs.tensor, rhs.tensor), product, options)
    work.hold(output, work.as_shape(Stored(product, model_order(rank), shape), work.sizes(output), name_of(output)))


def _fully_connected(work: Lowering, node: ir.Node, *, transposed_weights: bool) -> None:
    source = work.activation(node.inputs[0])
    weights, scales = _weights(work, node.inputs[1], 0 if transposed_weights else 1)
    if not transposed_weights:
        weights = weights.T
    if source.features is not None:
        # The features are in the order of the image in memory, see `Lowering.flattened`.
        weights = weights[:, source.features]
    elif source.order != model_order(len(source.shape)):
        source = work.arranged(source, model_order(len(source.shape)))
    kernel = work.fixed(name_of(node.inputs[1]), weights, _on_axis(scales, 0))
    bias = _bias(work, node, source, scales, weights.shape[0])
    rank = len(work.sizes(node.outputs[0]))
    # Otherwise the kernel would flatten the leading axes.
    options = {"keepNumDims": rank != 2}
    work.write(node, "FULLY_CONNECTED", (source.tensor, kernel, bias), model_order(rank), options)


def _weights(work: Lowering, value: ir.Value | None, axis: int) -> tuple[NDArray[Any], Scales | None]:
    """Return the constant weights of a node, as integers if the node computes on integers.

    Args:
        axis: axis of the output channels, which may each have a scale.
    """
    if work.integer:
        values, scales = work.constant(value)
        if scales is None:
            raise CannotWriteError(f"its weights {name_of(value)!r} are float, but its other tensors are integers")
        if scales.zero.any():
            raise CannotWriteError("its weights have a zero point")
        if scales.scale.size > 1 and scales.axis % values.ndim != axis:
            raise CannotWriteError("its weights have scales on another axis than that of its output channels")
        return values, scales
    return work.floats(value), None


def _on_axis(scales: Scales | None, axis: int) -> Scales | None:
    return None if scales is None else Scales(scales.scale, scales.zero, axis)


def _bias(work: Lowering, node: ir.Node, source: Stored, weights: Scales | None, channels: int) -> TfliteTensor:
    """Return the bias of a layer, as integers at the input's scale times the weights' scale, or as floats. They have 32
    bits next to 8-bit activations and 64 bits next to 16-bit ones.
    """
    value = node_input(node, 2)
    if value is not None and not work.is_constant(value):
        raise CannotWriteError("its bias is computed")
    if source.scales is None or weights is None:
        numbers = work.floats(value) if value is not None else np.zeros(channels, np.float32)
        return work.fixed(name_of(value) or f"{node.name}/bias", np.broadcast_to(numbers.ravel(), channels))
    # The kernel adds the bias to the sums of products, so it has their scale.
    scale = (source.scales.scale.astype(np.float64) * weights.scale.astype(np.float64)).astype(np.float32)
    scales = Scales(scale, np.zeros(scale.shape, np.int64), 0)
    dtype = np.dtype(BIAS_TYPES[work.type])
    values = np.zeros(channels, dtype)
    if value is not None:
        integers, params = work.constant(value)
        # Integers that already have this scale are taken as they are, without another rounding.
        exact = params is not None and integers.dtype == np.int32 and np.allclose(params.scale, scale, rtol=1e-6)
        values = integers if exact else np.rint(work.floats(value).ravel() / scale.astype(np.float64)).astype(dtype)
    values = np.ascontiguousarray(np.broadcast_to(values.ravel(), channels), dtype)
    return work.fixed(name_of(value) or f"{node.name}/bias", values, scales)


def _in_plain_order(work: Lowering, value: ir.Value | None) -> Stored:
    stored = work.activation(value)
    return work.arranged(stored, model_order(len(stored.shape)))
