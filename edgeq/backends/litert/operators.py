"""How each operator of ONNX is written: one function for a kind of operators.

Each reads its inputs as integers where the node computes on integers (`Lowering.integer`), else as floats, and writes
operators of the file that compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.litert.layout import Order, plain, stored_shape, transposed
from edgeq.backends.litert.lower import CannotWriteError, Lowering, Stored
from edgeq.backends.litert.network import Scales, Tensor
from edgeq.model.graph import Geometry, clamp_bounds, geometry, is_constant, is_op, name_of, node_input

_NHWC: Order = (0, 2, 3, 1)
_SAME, _VALID = "SAME", "VALID"


# Convolutions and matrix products.


def _conv(work: Lowering, node: ir.Node) -> None:
    source = _image(work, node)
    weights, weight_scales = _weights(work, node.inputs[1])
    shape = geometry(node, source.shape[2:], weights.shape[2:])
    padded, padding = _padded(work, node, source, shape)
    bias = _bias(work, node, source, weight_scales, weights.shape[0])
    options: dict[str, Any] = {"padding": padding, **_strides(shape), **_dilations(shape)}
    channels = source.shape[1]
    if shape.group == channels and weights.shape[1] == 1 and (shape.group > 1 or weights.shape[0] == 1):
        moved = weights.transpose(1, 2, 3, 0)
        kernel = work.fixed(name_of(node.inputs[1]), moved, _on_axis(weight_scales, 3))
        options["depthMultiplier"] = weights.shape[0] // channels
        work.write(node, "DEPTHWISE_CONV_2D", (padded, kernel, bias), _NHWC, options)
        return
    kernel = work.fixed(name_of(node.inputs[1]), weights.transpose(0, 2, 3, 1), _on_axis(weight_scales, 0))
    work.write(node, "CONV_2D", (padded, kernel, bias), _NHWC, options)


def _conv_transpose(work: Lowering, node: ir.Node) -> None:
    source = _image(work, node)
    weights, weight_scales = _weights(work, node.inputs[1])
    shape = geometry(node, source.shape[2:], weights.shape[2:])
    if shape.group != 1 or shape.dilations != (1, 1):
        raise CannotWriteError("it has groups or dilations, which TRANSPOSE_CONV has not")
    kernel = work.fixed(name_of(node.inputs[1]), weights.transpose(1, 2, 3, 0), _on_axis(weight_scales, 0))
    bias = _bias(work, node, source, weight_scales, weights.shape[1])
    n, c, *made = work.sizes(node.outputs[0])
    axes = range(2)
    full = [(source.shape[2 + a] - 1) * shape.strides[a] + shape.kernel[a] for a in axes]
    whole = [max(full[a], shape.strides[a] * source.shape[2 + a]) for a in axes]
    cut = [(shape.pads[a][0], shape.pads[a][0] + made[a]) for a in axes]
    same = [_same_pads(shape.strides[a] * source.shape[2 + a], shape.kernel[a], shape.strides[a]) for a in axes]
    order = _NHWC
    options: dict[str, Any] = {"padding": _VALID, **_strides(shape)}
    is_same = all(made[a] == shape.strides[a] * source.shape[2 + a] and same[a][0] == shape.pads[a][0] for a in axes)
    if is_same or cut == [(0, size) for size in full]:
        options["padding"] = _SAME if is_same else _VALID
        size = work.fixed("shape", np.array([n, *made, c], np.int32))
        work.write(node, "TRANSPOSE_CONV", (size, kernel, source.tensor, bias), order, options)
        return
    if any(end > size for (_, end), size in zip(cut, full, strict=True)):
        raise CannotWriteError(f"its output_padding reaches beyond what its kernel makes, {whole}")
    size = work.fixed("shape", np.array([n, *full, c], np.int32))
    scales = work.parameters(node)
    wide = work.partial(f"{node.outputs[0].name}/uncut", (n, *full, c), scales)
    work.emit("TRANSPOSE_CONV", (size, kernel, source.tensor, bias), wide, options)
    ends = [(0, n), *cut, (0, c)]
    work.write(node, "STRIDED_SLICE", (wide, *_slices(work, ends, [1] * 4)), order, _SLICING, like=wide)


def _gemm(work: Lowering, node: ir.Node) -> None:
    alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
    if (alpha, beta, node.attributes.get_int("transA", 0)) != (1, 1, 0):
        raise CannotWriteError("its alpha or beta is not 1, or it transposes its input")
    _fully_connected(work, node, transposed_weights=bool(node.attributes.get_int("transB", 0)))


def _matmul(work: Lowering, node: ir.Node) -> None:
    if work.is_constant(node.inputs[1]) and len(work.sizes(node.inputs[1])) == 2:
        _fully_connected(work, node, transposed_weights=False)
        return
    if work.is_constant(node.inputs[0]) or len(work.sizes(node.inputs[0])) < 2:
        raise CannotWriteError("its left matrix is constant, or a vector")
    left, right = (_in_plain_order(work, value) for value in node.inputs[:2])
    rank = len(work.sizes(node.outputs[0]))
    if len(right.shape) < 2:
        raise CannotWriteError("its right side is a vector")
    options = {"adjX": False, "adjY": False}
    work.write(node, "BATCH_MATMUL", (left.tensor, right.tensor), plain(rank), options)


def _fully_connected(work: Lowering, node: ir.Node, *, transposed_weights: bool) -> None:
    source = work.read(node.inputs[0])
    weights, scales = _weights(work, node.inputs[1])
    if not transposed_weights:
        weights = weights.T
    if source.features is not None:
        weights = weights[:, source.features]
    elif source.order != plain(len(source.shape)):
        source = work.arranged(source, plain(len(source.shape)))
    kernel = work.fixed(name_of(node.inputs[1]), weights, _on_axis(scales, 0))
    bias = _bias(work, node, source, scales, weights.shape[0])
    rank = len(work.sizes(node.outputs[0]))
    options = {"keepNumDims": rank != 2}
    work.write(node, "FULLY_CONNECTED", (source.tensor, kernel, bias), plain(rank), options)


def _weights(work: Lowering, value: ir.Value | None) -> tuple[NDArray[Any], Scales | None]:
    """Return the constant weights of a node: integers where it computes on integers."""
    if work.integer:
        values, scales = work.constant(value)
        if scales is None:
            raise CannotWriteError(f"its weights {name_of(value)!r} are floats between integers")
        return values, scales
    return work.floats(value), None


def _on_axis(scales: Scales | None, axis: int) -> Scales | None:
    return None if scales is None else Scales(scales.scale, scales.zero, axis)


def _bias(work: Lowering, node: ir.Node, source: Stored, weights: Scales | None, channels: int) -> Tensor:
    """Return the bias of a layer: 32-bit integers at scale input x weight, or floats."""
    value = node_input(node, 2)
    if value is not None and not work.is_constant(value):
        raise CannotWriteError("its bias is computed")
    if source.scales is None or weights is None:
        numbers = work.floats(value) if value is not None else np.zeros(channels, np.float32)
        return work.fixed(name_of(value) or f"{node.name}/bias", np.broadcast_to(numbers.ravel(), channels))
    scale = (source.scales.scale.astype(np.float64) * weights.scale.astype(np.float64)).astype(np.float32)
    scales = Scales(scale, np.zeros(scale.shape, np.int64), 0)
    values = np.zeros(channels, np.int32)
    if value is not None:
        given, params = work.constant(value)
        exact = params is not None and given.dtype == np.int32 and np.allclose(params.scale, scale, rtol=1e-6)
        values = given if exact else np.rint(work.floats(value).ravel() / scale.astype(np.float64)).astype(np.int32)
    values = np.ascontiguousarray(np.broadcast_to(values.ravel(), channels), np.int32)
    return work.fixed(name_of(value) or f"{node.name}/bias", values, scales)


# Windows.


def _image(work: Lowering, node: ir.Node) -> Stored:
    found = work.read(node.inputs[0])
    if len(found.shape) != 4:
        raise CannotWriteError(f"its input has {len(found.shape)} axes; the file has windows on two of four")
    return work.arranged(found, _NHWC)


def _strides(shape: Geometry) -> dict[str, Any]:
    return {"strideH": shape.strides[0], "strideW": shape.strides[1]}


def _dilations(shape: Geometry) -> dict[str, Any]:
    return {"dilationHFactor": shape.dilations[0], "dilationWFactor": shape.dilations[1]}


def _same_pads(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Return the padding that SAME stands for."""
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def _padded(work: Lowering, node: ir.Node, source: Stored, shape: Geometry, lowest: bool = False) -> tuple[Tensor, str]:
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
        return source.tensor, _VALID
    same = [_same_pads(source.shape[2 + a], shape.kernel[a], shape.strides[a], shape.dilations[a]) for a in range(2)]
    if same == pads and all(made[a] == -(-source.shape[2 + a] // shape.strides[a]) for a in range(2)):
        return source.tensor, _SAME
    return _pad(work, source.tensor, [(0, 0), *pads, (0, 0)], -np.inf if lowest else 0.0), _VALID


def _pad(work: Lowering, source: Tensor, pads: Sequence[tuple[int, int]], value: float) -> Tensor:
    """Write a padding with one number; of integers the nearest one."""
    wide = tuple(size + before + after for size, (before, after) in zip(source.shape, pads, strict=True))
    made = work.like(source, f"{source.name}/padded", wide)
    table = work.fixed("paddings", np.array(pads, np.int32))
    filler, zero = _filler(source, value)
    if filler == zero:
        return work.emit("PAD", (source, table), made)
    kind = source.type
    constant = work.fixed("padding", np.array([filler], np.dtype(kind)), source.scales)
    return work.emit("PADV2", (source, table, constant), made)


def _filler(source: Tensor, value: float) -> tuple[float, float]:
    """Return the number that stands for `value` in a tensor, and the one for 0."""
    if source.scales is None:
        return (float(np.finfo(np.float32).min) if value == -np.inf else value), 0.0
    zero = int(source.scales.zero[0])
    if value == -np.inf:
        return -128, zero
    return int(np.clip(np.rint(value / float(source.scales.scale[0])) + zero, -128, 127)), zero


def _pool(work: Lowering, node: ir.Node) -> None:
    if len(node.outputs) > 1 and node.outputs[1].uses():
        raise CannotWriteError("its second output, the places of the largest numbers, is read")
    source = _image(work, node)
    kernel = tuple(node.attributes.get_ints("kernel_shape", ()))
    shape = geometry(node, source.shape[2:], kernel)
    largest = node.op_type == "MaxPool"
    if set(shape.dilations) != {1}:
        raise CannotWriteError(f"it has dilations {list(shape.dilations)}")
    padded, padding = _padded(work, node, source, shape, lowest=largest)
    counts_pads = node.attributes.get_int("count_include_pad", 0)
    if not largest and padding == _SAME and counts_pads:
        pads = [(0, 0), *(_same_pads(source.shape[2 + a], kernel[a], shape.strides[a]) for a in range(2)), (0, 0)]
        padded, padding = _pad(work, source.tensor, pads, 0.0), _VALID
    elif not largest and padded is not source.tensor and not (counts_pads and _within(node, shape, source, padded)):
        raise CannotWriteError("its padding is not that of SAME, and does not count in its averages")
    options = {"padding": padding, **_strides(shape), "filterHeight": kernel[0], "filterWidth": kernel[1]}
    kind = "MAX_POOL_2D" if largest else "AVERAGE_POOL_2D"
    work.write(node, kind, (padded,), _NHWC, options, like=padded)


def _within(node: ir.Node, shape: Geometry, source: Stored, padded: Tensor) -> bool:
    """Return whether no window reaches beyond the padding that the node itself has."""
    del node
    return all(padded.shape[1 + axis] <= source.shape[2 + axis] + sum(shape.pads[axis]) for axis in range(2))


def _mean(work: Lowering, node: ir.Node) -> None:
    source = work.read(node.inputs[0])
    rank = len(source.shape)
    if node.op_type.startswith("Global"):
        axes, keeps = list(range(2, rank)), True
    else:
        given = work.constant(node.inputs[1])[0] if node_input(node, 1) is not None else None
        named = given.tolist() if given is not None else list(node.attributes.get_ints("axes", range(rank)))
        axes, keeps = sorted(axis % rank for axis in named), bool(node.attributes.get_int("keepdims", 1))
    if source.features is not None:
        source = work.arranged(source, plain(rank))
    order = source.order if keeps else _without(source.order, axes)
    table = work.fixed("axes", np.array(sorted(source.order.index(axis) for axis in axes), np.int32))
    kind = {"ReduceSum": "SUM", "ReduceMax": "REDUCE_MAX", "GlobalMaxPool": "REDUCE_MAX", "ReduceMin": "REDUCE_MIN"}
    found = kind.get(node.op_type, "MEAN")
    like = source.tensor if found.startswith("REDUCE") else None
    work.write(node, found, (source.tensor, table), order, {"keepDims": keeps}, like=like)


def _without(order: Order, axes: Sequence[int]) -> Order:
    kept = [axis for axis in order if axis not in axes]
    return tuple(sorted(kept).index(axis) for axis in kept)


# Element by element.


def _binary(kind: str) -> Callable[[Lowering, ir.Node], None]:
    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator of two tensors that are broadcast."""
        left, right, order = _broadcast(work, node)
        scales = work.parameters(node)
        if scales is not None and kind in ("MAXIMUM", "MINIMUM"):
            left, right = work.requantized(left, scales), work.requantized(right, scales)
        work.write(node, kind, (left.tensor, right.tensor), order, _ACTIVATED.get(kind))

    return write


_ACTIVATED: dict[str, dict[str, Any]] = {
    kind: {"fusedActivationFunction": "NONE"} for kind in ("ADD", "SUB", "MUL", "DIV")
}


def _broadcast(work: Lowering, node: ir.Node) -> tuple[Stored, Stored, Order]:
    """Return the two inputs of a node in one order of axes, and that order."""
    rank = len(work.sizes(node.outputs[0]))
    given: list[Stored | None] = [None if work.is_constant(v) else work.read(v) for v in node.inputs[:2]]
    found = [_raised(work, value, rank) for value in given if value is not None]
    moving = [value for value in found if value.order != plain(rank)]
    # The larger one stays as it is.
    order = max(moving or found, key=lambda value: int(np.prod(value.shape))).order if found else plain(rank)
    sides = []
    for value, stored in zip(node.inputs[:2], given, strict=True):
        if stored is None:
            sides.append(_constant_side(work, value, rank, order))
        else:
            sides.append(work.arranged(_raised(work, stored, rank), order))
    return sides[0], sides[1], order


def _raised(work: Lowering, found: Stored, rank: int) -> Stored:
    missing = rank - len(found.shape)
    return work.as_shape(found, (*[1] * missing, *found.shape), f"{found.tensor.name}/raised") if missing else found


def _constant_side(work: Lowering, value: ir.Value | None, rank: int, order: Order) -> Stored:
    values, scales = work.constant(value) if work.integer else (work.floats(value), None)
    if work.integer and scales is None:
        scales = _spread(values)
        values = np.clip(np.rint(values / scales.scale[0]) + scales.zero[0], -128, 127).astype(np.int8)
    if scales is not None and scales.scale.size > 1:
        raise CannotWriteError("it reads a constant with a scale for each channel")
    raised = values.reshape((1,) * (rank - values.ndim) + values.shape)
    stored = raised.transpose(order) if values.size > 1 else values.reshape((1,) * rank)
    return Stored(work.fixed(name_of(value), stored, scales), order, raised.shape)


def _spread(values: NDArray[Any]) -> Scales:
    """Return scales for a constant: its largest magnitude is 127."""
    return Scales.of(float(np.abs(values).max(initial=0)) / 127 or 1.0, 0)


def _unary(kind: str, **options: Any) -> Callable[[Lowering, ir.Node], None]:
    def write(work: Lowering, node: ir.Node) -> None:
        """Write an operator of one tensor."""
        source = work.read(node.inputs[0])
        if source.features is not None:
            source = work.arranged(source, plain(2))
        work.write(node, kind, (source.tensor,), source.order, dict(options), scales=_FIXED.get(kind))

    return write


_FIXED = {"LOGISTIC": Scales.of(1 / 256, -128), "TANH": Scales.of(1 / 128, 0)}
"""What the file's kernels make, whatever its scales say."""


def _leaky(work: Lowering, node: ir.Node) -> None:
    _unary("LEAKY_RELU", alpha=node.attributes.get_float("alpha", 0.01))(work, node)


def _gelu(work: Lowering, node: ir.Node) -> None:
    approximate = node.attributes.get_string("approximate", "none") == "tanh"
    _unary("GELU", approximate=approximate)(work, node)


def _prelu(work: Lowering, node: ir.Node) -> None:
    source = work.read(node.inputs[0])
    slope = _constant_side(work, node.inputs[1], len(source.shape), source.order)
    shape = slope.tensor.shape[1:]
    values, scales = slope.tensor.values, slope.tensor.scales
    assert values is not None
    if slope.shape[0] != 1:
        raise CannotWriteError("it has a slope for each sample")
    wide = (
        np.broadcast_to(values.reshape(shape), (*[1] * (len(shape) - 1), source.tensor.shape[-1]))
        if (values.size == 1)
        else values.reshape(shape)
    )
    alpha = work.fixed(name_of(node.inputs[1]), np.ascontiguousarray(wide), scales)
    work.write(node, "PRELU", (source.tensor, alpha), source.order)


def _clamp(work: Lowering, node: ir.Node) -> None:
    source, bounds = work.read(node.inputs[0]), clamp_bounds(node)
    if bounds is None:
        raise CannotWriteError("its bounds are computed")
    if source.features is not None:
        source = work.arranged(source, plain(2))
    kind = {(0.0, np.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}.get(bounds)
    if not work.integer and kind is not None:
        work.write(node, kind, (source.tensor,), source.order)
        return
    current = source
    for bound, step in zip(bounds, ("MAXIMUM", "MINIMUM"), strict=True):
        if np.isinf(bound):
            continue
        tensor = current.tensor
        filler = np.array([_filler(tensor, bound)[0]], np.dtype(tensor.type)).reshape((1,) * len(tensor.shape))
        limit = work.fixed(f"{node.name}/bound", filler, tensor.scales)
        made = work.like(tensor, f"{node.outputs[0].name}/{step.lower()}", tensor.shape)
        work.emit(step, (tensor, limit), made)
        current = Stored(made, current.order, current.shape)
    work.hold(node.outputs[0], current)


def _hard_sigmoid(work: Lowering, node: ir.Node) -> None:
    """Write clamp(alpha x + beta, 0, 1). Of integers: (x + beta / alpha) with a scale that is 1 / alpha of the
    result's, whose range clamps, times alpha, which changes no integer."""
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    source, scales = work.read(node.inputs[0]), work.parameters(node)
    ones, name = (1,) * len(source.shape), name_of(node.outputs[0])
    if scales is None:
        shape, order, tensor = source.tensor.shape, source.order, source.tensor
        for kind, number in (("MUL", alpha), ("ADD", beta), ("MAXIMUM", 0.0), ("MINIMUM", 1.0)):
            constant = work.fixed(f"{name}/{kind.lower()}", np.full(ones, number, np.float32))
            if kind == "MINIMUM":
                work.write(node, kind, (tensor, constant), order)
            else:
                made = work.partial(f"{name}/{kind.lower()}ed", shape, None)
                tensor = work.emit(kind, (tensor, constant), made, _ACTIVATED.get(kind))
        return
    if alpha <= 0 or beta < 0:
        raise CannotWriteError(f"its alpha, {alpha:g}, is not positive, or its beta, {beta:g}, is negative")
    low, high = ((end - int(scales.zero[0])) * float(scales.scale[0]) for end in (-128, 127))
    if low < -float(scales.scale[0]) / 2 or high > 1 + float(scales.scale[0]) / 2:
        raise CannotWriteError("the range of its result is wider than 0 to 1")
    wide = Scales.of(float(scales.scale[0]) / alpha, int(scales.zero[0]))
    shift = work.fixed(f"{name}/shift", np.full(ones, 127, np.int8), Scales.of(beta / alpha / 127, 0))
    factor = work.fixed(f"{name}/factor", np.full(ones, 127, np.int8), Scales.of(alpha / 127, 0))
    moved = work.emit(
        "ADD", (source.tensor, shift), work.partial(f"{name}/shifted", source.tensor.shape, wide), _ACTIVATED["ADD"]
    )
    work.write(node, "MUL", (moved, factor), source.order, _ACTIVATED["MUL"])


def _softmax(work: Lowering, node: ir.Node) -> None:
    source = work.read(node.inputs[0])
    rank = len(source.shape)
    axis = node.attributes.get_int("axis", -1) % rank
    order = source.order
    if order[-1] != axis:
        order = (*[a for a in range(rank) if a != axis], axis)
    source = work.arranged(source, order)
    kind = "LOG_SOFTMAX" if node.op_type == "LogSoftmax" else "SOFTMAX"
    fixed = Scales.of(16 / 256, 127) if kind == "LOG_SOFTMAX" else Scales.of(1 / 256, -128)
    work.write(node, kind, (source.tensor,), order, {"beta": 1.0} if kind == "SOFTMAX" else {}, scales=fixed)


def _batch_norm(work: Lowering, node: ir.Node) -> None:
    source = work.read(node.inputs[0])
    if work.integer:
        raise CannotWriteError("it stands between integers")
    gamma, beta, mean, variance = (work.floats(value).astype(np.float64) for value in node.inputs[1:5])
    factor = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    shape = [1] * len(source.shape)
    if len(shape) > 1:
        shape[source.order.index(1)] = -1
    name = name_of(node.outputs[0])
    scaled = work.partial(f"{name}/scaled", source.tensor.shape, None)
    for_each = [
        work.fixed(f"{name}/{i}", v.astype(np.float32).reshape(shape))
        for i, v in enumerate((factor, beta - mean * factor))
    ]
    work.emit("MUL", (source.tensor, for_each[0]), scaled, _ACTIVATED["MUL"])
    work.write(node, "ADD", (scaled, for_each[1]), source.order, _ACTIVATED["ADD"])


# What only moves elements.


def _reshape(work: Lowering, node: ir.Node) -> None:
    source, value = work.read(node.inputs[0]), node.outputs[0]
    shape = work.sizes(value)
    if 0 in shape or 0 in source.shape:
        raise CannotWriteError("it makes a tensor without elements")
    flat = len(shape) == 2 and source.shape[0] == shape[0] and value.uses()
    if flat and not value.is_graph_output() and _only_products(work, value):
        work.hold(value, work.flattened(source, name_of(value)))
    else:
        work.hold(value, work.as_shape(source, shape, name_of(value)))


def _only_products(work: Lowering, value: ir.Value) -> bool:
    """Return whether nothing reads a tensor but products with constant weights, which can take its features in any
    order, behind nodes that work on each element."""
    for use in value.uses():
        node = use.node
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Identity", "Dropout"):
            result = node.outputs[0]
            if result.is_graph_output() or not result.uses() or not _only_products(work, result):
                return False
        else:
            product = is_op(node, "Gemm", "MatMul") and use.idx == 0 and node.attributes.get_int("transA", 0) == 0
            if not product or not work.is_constant(node.inputs[1]) or len(work.sizes(node.inputs[1])) != 2:
                return False
    return True


def _identity(work: Lowering, node: ir.Node) -> None:
    work.hold(node.outputs[0], work.read(node.inputs[0]))


def _transpose(work: Lowering, node: ir.Node) -> None:
    source, value = work.read(node.inputs[0]), node.outputs[0]
    if source.features is not None:
        source = work.arranged(source, plain(2))
    rank = len(source.shape)
    permutation = list(node.attributes.get_ints("perm", range(rank - 1, -1, -1)))
    work.hold(value, Stored(source.tensor, transposed(source.order, permutation), work.sizes(value)))


def _concat(work: Lowering, node: ir.Node) -> None:
    found = [work.read(value) for value in node.inputs]
    scales = work.parameters(node) if work.integer else None
    if scales is None and work.integer:
        raise CannotWriteError("what it joins has no scale in common")
    moving = [f for f in found if f.order != plain(len(f.shape))]
    order = (moving or found)[0].order
    axis = node.attributes.get_int("axis", 0) % len(order)
    sides = [work.arranged(f if scales is None else work.requantized(f, scales), order) for f in found]
    options = {"axis": order.index(axis), "fusedActivationFunction": "NONE"}
    tensors = [side.tensor for side in sides]
    work.write(node, "CONCATENATION", tensors, order, options, like=tensors[0])


_SLICING = {"beginMask": 0, "endMask": 0, "ellipsisMask": 0, "newAxisMask": 0, "shrinkAxisMask": 0, "offset": False}


def _slices(work: Lowering, ends: Sequence[tuple[int, int]], steps: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    columns = ([b for b, _ in ends], [e for _, e in ends], list(steps))
    begin, end, step = (
        work.fixed(name, np.array(column, np.int32))
        for name, column in zip(("begin", "end", "strides"), columns, strict=True)
    )
    return begin, end, step


def _cut(
    work: Lowering, node: ir.Node, source: Stored, spans: dict[int, tuple[int, int, int]], output: int = 0
) -> None:
    """Write the part of a tensor between (begin, end, step) of some axes of the model."""
    whole = [spans.get(axis, (0, source.shape[axis], 1)) for axis in source.order]
    ends = [(begin, end) for begin, end, _ in whole]
    parts = _slices(work, ends, [step for _, _, step in whole])
    work.write(
        node, "STRIDED_SLICE", (source.tensor, *parts), source.order, _SLICING, like=source.tensor, output=output
    )


def _slice(work: Lowering, node: ir.Node) -> None:
    source = _whole(work, node)
    given = [work.constant(value)[0].ravel() if value is not None else None for value in node.inputs[1:]]
    if len(node.inputs) < 3 or given[0] is None or given[1] is None:
        raise CannotWriteError("its ends are computed")
    starts, stops = given[0], given[1]
    axes = given[2] if len(given) > 2 and given[2] is not None else np.arange(len(starts))
    steps = given[3] if len(given) > 3 and given[3] is not None else np.ones(len(starts), np.int64)
    spans = {}
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=True):
        place = int(axis) % len(source.shape)
        if step < 0:
            raise CannotWriteError("it goes backwards")
        first, last, stride = slice(int(start), int(stop), int(step)).indices(source.shape[place])
        spans[place] = (first, last, stride)
    _cut(work, node, source, spans)


def _split(work: Lowering, node: ir.Node) -> None:
    source = _whole(work, node)
    axis, begin = node.attributes.get_int("axis", 0) % len(source.shape), 0
    for place, value in enumerate(node.outputs):
        size = work.sizes(value)[axis]
        if value.uses() or value.is_graph_output():
            _cut(work, node, source, {axis: (begin, begin + size, 1)}, place)
        begin += size


def _whole(work: Lowering, node: ir.Node) -> Stored:
    found = work.read(node.inputs[0])
    return work.arranged(found, plain(2)) if found.features is not None else found


def _gather(work: Lowering, node: ir.Node) -> None:
    if is_constant(node.inputs[1]) and not work.is_constant(node.inputs[0]):
        source, (places, _) = _whole(work, node), work.constant(node.inputs[1])
        axis = node.attributes.get_int("axis", 0) % len(source.shape)
        size = source.shape[axis]
        places = places % size
        if places.ndim == 1 and source.order.index(axis) >= 0:
            table = work.fixed("places", places.astype(np.int32))
            options = {"axis": source.order.index(axis), "batchDims": 0}
            work.write(node, "GATHER", (source.tensor, table), source.order, options, like=source.tensor)
            return
        if places.ndim == 0:
            table = work.fixed("places", places.astype(np.int32).reshape(1))
            one = tuple(1 if a == axis else s for a, s in enumerate(source.shape))
            made = work.like(source.tensor, f"{node.outputs[0].name}/one", stored_shape(one, source.order))
            work.emit("GATHER", (source.tensor, table), made, {"axis": source.order.index(axis), "batchDims": 0})
            held = Stored(made, source.order, one)
            work.hold(node.outputs[0], work.as_shape(held, work.sizes(node.outputs[0]), name_of(node.outputs[0])))
            return
    axis = node.attributes.get_int("axis", 0)
    source, places_ = work.read(node.inputs[0]), work.stored(node.inputs[1])
    source = work.arranged(source, plain(len(source.shape)))
    rank = len(work.sizes(node.outputs[0]))
    options = {"axis": axis % len(source.shape), "batchDims": 0}
    places_ = work.arranged(places_, plain(len(places_.shape)))
    work.write(node, "GATHER", (source.tensor, places_.tensor), plain(rank), options, like=source.tensor)


def _pad_node(work: Lowering, node: ir.Node) -> None:
    source, mode = _whole(work, node), node.attributes.get_string("mode", "constant")
    rank = len(source.shape)
    given = work.constant(node.inputs[1])[0].ravel().tolist()
    axes_value = node_input(node, 3)
    axes = [int(a) % rank for a in work.constant(axes_value)[0].ravel()] if axes_value is not None else range(rank)
    count = len(given) // 2
    pads = dict.fromkeys(range(rank), (0, 0)) | {
        axis: (int(given[i]), int(given[i + count])) for i, axis in enumerate(axes)
    }
    if any(min(pair) < 0 for pair in pads.values()):
        raise CannotWriteError("it takes elements away")
    table = [pads[axis] for axis in source.order]
    if mode == "reflect":
        padding = work.fixed("paddings", np.array(table, np.int32))
        options = {"mode": "REFLECT"}
        work.write(node, "MIRROR_PAD", (source.tensor, padding), source.order, options, like=source.tensor)
        return
    if mode != "constant":
        raise CannotWriteError(f"it pads in mode {mode}")
    value = node_input(node, 2)
    number = float(work.floats(value).reshape(())) if value is not None else 0.0
    work.hold(
        node.outputs[0],
        Stored(_pad(work, source.tensor, table, number), source.order, work.sizes(node.outputs[0])),
    )


def _resize(work: Lowering, node: ir.Node) -> None:
    source, made = _image(work, node), work.sizes(node.outputs[0])
    if made[:2] != source.shape[:2]:
        raise CannotWriteError("it resizes channels")
    mode = node.attributes.get_string("mode", "nearest")
    how = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    rounding = node.attributes.get_string("nearest_mode", "round_prefer_floor")
    size = work.fixed("size", np.array(made[2:], np.int32))
    whole = all(new % old == 0 for new, old in zip(made[2:], source.shape[2:], strict=True))
    if mode == "nearest":
        by_floor = how == "asymmetric" and rounding == "floor"
        by_half = how in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round_prefer")
        if not (by_floor or (by_half and whole)):
            raise CannotWriteError(f"the nearest element by {how} and {rounding} is another one there")
        options = {"alignCorners": False, "halfPixelCenters": False}
        work.write(node, "RESIZE_NEAREST_NEIGHBOR", (source.tensor, size), _NHWC, options, like=source.tensor)
        return
    known = {"half_pixel": (False, True), "align_corners": (True, False), "asymmetric": (False, False)}
    if mode != "linear" or how.replace("pytorch_", "") not in known:
        raise CannotWriteError(f"it resizes by {mode} and {how}")
    corners, half = known[how.replace("pytorch_", "")]
    options = {"alignCorners": corners, "halfPixelCenters": half}
    work.write(node, "RESIZE_BILINEAR", (source.tensor, size), _NHWC, options, like=source.tensor)


def _depth(work: Lowering, node: ir.Node) -> None:
    block = node.attributes.get_int("blocksize", 1)
    to_space = node.op_type == "DepthToSpace"
    if to_space and node.attributes.get_string("mode", "DCR") == "DCR":
        source = _image(work, node)
        work.write(node, "DEPTH_TO_SPACE", (source.tensor,), _NHWC, {"blockSize": block}, like=source.tensor)
        return
    source = work.read(node.inputs[0])
    n, c, h, w = source.shape
    name = name_of(node.outputs[0])
    if to_space:
        split, permutation = (n, c // block**2, block, block, h, w), [0, 1, 4, 2, 5, 3]
    else:
        split, permutation = (n, c, h // block, block, w // block, block), [0, 3, 5, 1, 2, 4]
    parts = work.as_shape(source, split, f"{name}/split")
    shape = tuple(split[axis] for axis in permutation)
    moved = Stored(parts.tensor, transposed(parts.order, permutation), shape)
    work.hold(node.outputs[0], work.as_shape(moved, work.sizes(node.outputs[0]), name))


def _in_plain_order(work: Lowering, value: ir.Value | None) -> Stored:
    found = work.read(value)
    return work.arranged(found, plain(len(found.shape)))


def _cast(work: Lowering, node: ir.Node) -> None:
    source = work.read(node.inputs[0])
    made = node.outputs[0].dtype
    if source.tensor.type == "int32" and made in (ir.DataType.INT32, ir.DataType.INT64):
        work.hold(node.outputs[0], source)
        return
    if source.tensor.type == "int32" and made == ir.DataType.FLOAT:
        options = {"inDataType": "INT32", "outDataType": "FLOAT32"}
        work.write(node, "CAST", (source.tensor,), source.order, options)
        return
    raise CannotWriteError(f"it makes {made} of {source.tensor.type}")


_BINARY = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "DIV", "Max": "MAXIMUM", "Min": "MINIMUM"}
_ALIKE: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **{name: _binary(kind) for name, kind in _BINARY.items()},
    **{
        name: _unary(kind)
        for name, kind in {
            "Sigmoid": "LOGISTIC",
            "Tanh": "TANH",
            "HardSwish": "HARD_SWISH",
            "Elu": "ELU",
            "Exp": "EXP",
            "Sqrt": "SQRT",
            "Abs": "ABS",
            "Neg": "NEG",
            "Log": "LOG",
            "Sin": "SIN",
            "Cos": "COS",
        }.items()
    },
    **dict.fromkeys(("Relu", "Clip"), _clamp),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    **dict.fromkeys(("Identity", "Dropout"), _identity),
    **dict.fromkeys(("MaxPool", "AveragePool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "GlobalMaxPool"), _mean),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth),
}

HANDLERS: dict[str, Callable[[Lowering, ir.Node], None]] = {
    **_ALIKE,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _leaky,
    "MatMul": _matmul,
    "PRelu": _prelu,
    "Pad": _pad_node,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
