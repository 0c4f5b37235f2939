"""Lower ONNX operators to the runtime's nodes. Every attribute is written, because the runtime has no defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from edgeq.backends.espdl.chips import wide_kernels
from edgeq.backends.espdl.graph import CannotLowerError, EspLowering, EspScale, EspStored, exponents_of
from edgeq.backends.espdl.network import DEPTHWISE, FILTER, Attribute, EspTensor
from edgeq.backends.espdl.tables import function_of
from edgeq.backends.litert.layout import channels_last, model_order, stored_shape, transposed
from edgeq.model.graph import KernelGeometry, constant, geometry, node_input

_SOFTMAX_EXPONENT = -1
"""The largest exponent of 8-bit inputs of a Softmax. The kernel takes exponentials without subtracting the largest
number: e^(127 / 2) is a float32 number, and e^127 is not.
"""
_IMAGE = 4


def _conv(work: EspLowering, node: ir.Node) -> None:
    data = _image(work, node)
    weights, params = work.constant(node.inputs[1])
    if params is None:
        raise CannotLowerError("its weights are not quantized")
    if weights.ndim != _IMAGE:
        raise CannotLowerError("edgeq writes only convolutions of images")
    window = geometry(node, data.shape[2:], weights.shape[2:])
    channels = weights.shape[0]
    if window.group not in (1, channels) or (window.group > 1 and window.group != data.shape[1]):
        raise CannotLowerError(f"it has {window.group} groups; ESP-DL computes 1, or as many as there are channels")
    # NCHW → HWCN. A depthwise filter [N, 1, H, W] is stored as [H, W, N, 1].
    axes, layout = ((2, 3, 0, 1), DEPTHWISE) if window.group > 1 else ((2, 3, 1, 0), FILTER)
    attributes: dict[str, Attribute] = {"group": window.group, "dilations": window.dilations, **_window(window)}
    _layer(work, node, "Conv", data, weights.transpose(axes), layout, attributes)


def _gemm(work: EspLowering, node: ir.Node) -> None:
    weights, _ = work.constant(node.inputs[1])
    attributes = node.attributes
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1) != 1 or attributes.get_float("beta", 1) != 1:
        raise CannotLowerError("it has factors, or its first matrix is transposed")
    weights = weights.T if attributes.get_int("transB", 0) else weights
    _product(work, node, weights)


def _matmul(work: EspLowering, node: ir.Node) -> None:
    weights, _ = work.constant(node.inputs[1])
    if weights.ndim != 2:
        raise CannotLowerError("it does not multiply by a constant matrix")
    _product(work, node, weights)


def _product(work: EspLowering, node: ir.Node, weights: np.ndarray) -> None:
    data = _in_model_order(work, work.integers(node.inputs[0]))
    # The runtime computes a product as a convolution of 1 × 1.
    _layer(work, node, "Gemm", data, weights[None, None], FILTER, {"transA": 0, "transB": 0})


def _layer(
    work: EspLowering,
    node: ir.Node,
    kind: str,
    data: EspStored,
    weights: np.ndarray,
    layout: str,
    attributes: Mapping[str, Attribute],
) -> None:
    """Write a Conv or Gemm with weights in the order HWCN."""
    params = work.constant(node.inputs[1])[1]
    if params is None:
        raise CannotLowerError("its weights are not quantized")
    exponents = exponents_of(params)
    if len(exponents) > 1 and not work.family.per_channel:
        raise CannotLowerError("its weights have several scales, and the kernels of this chip take one")
    if weights.dtype != np.int8 and weights.dtype != np.int16:
        raise CannotLowerError(f"its weights are {weights.dtype}")
    wide = data.tensor.type == "int16"
    # The kernels multiply integers of one type. 8-bit weights are also 16-bit weights.
    filters = work.fixed(f"{node.name}/weights", weights.astype(data.tensor.type), exponents, layout)
    inputs = [data.tensor, filters]
    bias = node_input(node, 2)
    sums = [data.tensor.exponent + exponent for exponent in exponents]
    if bias is not None:
        count = weights.shape[-2] if layout == DEPTHWISE else weights.shape[-1]
        inputs.append(_bias(work, node, bias, sums, count, wide=wide))
    # A shift to the left is an error in the runtime, so `finish` gives the layer the exponent of its sums instead.
    work.finish(node, kind, inputs, data.order, attributes, exponent=max(sums))


def _bias(work: EspLowering, node: ir.Node, bias: ir.Value, sums: list[int], count: int, *, wide: bool) -> EspTensor:
    """Return the bias as integers with the exponents of the sums."""
    numbers = work.floats(bias).ravel()
    if numbers.size not in (1, count):
        raise CannotLowerError("its bias is not one number for each channel")
    steps = np.rint(np.broadcast_to(numbers, (count,)) * 2.0 ** -np.array(sums, np.float64))
    bits = wide_kernels().accumulator_bits if wide else work.family.bias_bits
    if steps.min(initial=0) < -(2 ** (bits - 1)) or steps.max(initial=0) >= 2 ** (bits - 1):
        worst = int(np.abs(steps).argmax())
        raise CannotLowerError(
            f"the bias of channel {worst} is {steps[worst]:.0f}, and the kernels of this chip take {bits} bits"
        )
    return work.fixed(f"{node.name}/bias", steps.astype(np.int64 if wide else np.int32), sums)


def _window(window: KernelGeometry) -> dict[str, Attribute]:
    before, after = zip(*window.pads, strict=True)
    return {"kernel_shape": window.kernel, "strides": window.strides, "pads": (*before, *after)}


def _image(work: EspLowering, node: ir.Node) -> EspStored:
    """Return the first input as NHWC."""
    data = work.integers(node.inputs[0])
    if len(data.shape) != _IMAGE:
        raise CannotLowerError(f"its input has {len(data.shape)} axes, and edgeq writes it for images")
    return work.arranged(data, channels_last(_IMAGE))


def _in_model_order(work: EspLowering, stored: EspStored) -> EspStored:
    return work.arranged(stored, model_order(len(stored.shape)))


def _pool(work: EspLowering, node: ir.Node) -> None:
    data = _image(work, node)
    window = geometry(node, data.shape[2:], tuple(node.attributes.get_ints("kernel_shape", ())))
    if set(window.dilations) != {1}:
        raise CannotLowerError("it has a dilation")
    averages = node.op_type == "AveragePool"
    if averages and any(map(any, window.pads)) and not node.attributes.get_int("count_include_pad", 0):
        raise CannotLowerError("the runtime counts the padding in an average")
    shape = work.sizes(node.outputs[0])
    fits = (
        (size + sum(pads) - taps) // stride + 1
        for size, pads, taps, stride in zip(data.shape[2:], window.pads, window.kernel, window.strides, strict=True)
    )
    if tuple(fits) != shape[2:]:
        raise CannotLowerError("it rounds the size of its result up")
    if averages:
        work.finish(node, node.op_type, [data.tensor], data.order, _window(window))
    else:
        _move(work, node, node.op_type, data, data.order, _window(window))


def _global_average_pool(work: EspLowering, node: ir.Node) -> None:
    data = _image(work, node)
    work.finish(node, "GlobalAveragePool", [data.tensor], data.order)


def _move(
    work: EspLowering,
    node: ir.Node,
    kind: str,
    data: EspStored,
    order: tuple[int, ...],
    attributes: Mapping[str, Attribute] | None = None,
    more: tuple[EspTensor | None, ...] = (),
) -> None:
    """Write a node that keeps the exponent of its input."""
    value = node.outputs[0]
    shape = work.sizes(value)
    tensor = work.fresh(str(value.name), data.tensor, stored_shape(shape, order))
    work.emit(kind, (data.tensor, *more), tensor, attributes)
    work.hold(value, EspStored(tensor, order, shape))


def _reshape(work: EspLowering, node: ir.Node) -> None:
    data, shape = _in_model_order(work, work.stored(node.inputs[0])), work.sizes(node.outputs[0])
    if shape == data.shape:
        work.hold(node.outputs[0], data)
        return
    _move(work, node, "Reshape", data, model_order(len(shape)), {"allowzero": 0}, (work.numbers(shape),))


def _identity(work: EspLowering, node: ir.Node) -> None:
    work.hold(node.outputs[0], work.stored(node.inputs[0]))


def _transpose(work: EspLowering, node: ir.Node) -> None:
    # Only the meaning of the axes changes; a Transpose follows where a node needs another order.
    data = work.stored(node.inputs[0])
    permutation = node.attributes.get_ints("perm", list(range(len(data.shape)))[::-1])
    shape = tuple(data.shape[axis] for axis in permutation)
    work.hold(node.outputs[0], EspStored(data.tensor, transposed(data.order, permutation), shape))


def _concat(work: EspLowering, node: ir.Node) -> None:
    parts = [work.integers(value) for value in node.inputs]
    axis = node.attributes.get_int("axis", 0) % len(parts[0].shape)
    # The exponent of the largest numbers holds all parts.
    types = {part.tensor.type for part in parts}
    scale = EspScale("int16" if "int16" in types else "int8", max(part.tensor.exponent for part in parts))
    order = parts[0].order
    aligned = [work.requantized(work.arranged(part, order), scale) for part in parts]
    more = tuple(part.tensor for part in aligned[1:])
    _move(work, node, "Concat", aligned[0], order, {"axis": order.index(axis)}, more)


def _add(work: EspLowering, node: ir.Node) -> None:
    scale = work.result(node).scale
    order, operands = _operands(work, node, scale)
    # The integer kernel adds numbers of one exponent; for others the runtime would compute in float.
    work.finish(node, node.op_type, [work.requantized(part, scale).tensor for part in operands], order)


def _mul(work: EspLowering, node: ir.Node) -> None:
    order, operands = _operands(work, node, None)
    types = {part.tensor.type for part in operands}
    if len(types) > 1:
        operands = [work.requantized(part, EspScale("int16", part.tensor.exponent)) for part in operands]
    work.finish(node, "Mul", [part.tensor for part in operands], order)


def _operands(work: EspLowering, node: ir.Node, scale: EspScale | None) -> tuple[tuple[int, ...], list[EspStored]]:
    """Return the two inputs of a node in one order of axes, and this order.

    Args:
        scale: the scale of a constant; None for the finest that holds it.
    """
    rank = len(work.sizes(node.outputs[0]))
    computed = [work.integers(value) for value in node.inputs if not work.is_constant(value)]
    order = next((part.order for part in computed if len(part.order) == rank), model_order(rank))
    operands = []
    for value in node.inputs:
        if work.is_constant(value):
            numbers = work.floats(value)
            shape = (1,) * (rank - numbers.ndim) + numbers.shape
            part = scale or EspScale(computed[0].tensor.type, _finest(numbers, computed[0].tensor.type))
            values = numbers.reshape(shape).transpose(order)
            operands.append(EspStored(work.quantized(f"{node.name}/constant", values, part), order, shape))
            continue
        part_stored = work.integers(value)
        if len(part_stored.shape) < rank:
            part_stored = _with_rank(work, part_stored, rank)
        operands.append(work.arranged(part_stored, order))
    return order, operands


def _with_rank(work: EspLowering, stored: EspStored, rank: int) -> EspStored:
    """Return a tensor with axes of size 1 in front, as broadcasting adds them."""
    stored = _in_model_order(work, stored)
    shape = (1,) * (rank - len(stored.shape)) + stored.shape
    tensor = work.fresh(f"{stored.tensor.name}/broadcast", stored.tensor, shape)
    work.reshape(stored.tensor, tensor)
    return EspStored(tensor, model_order(rank), shape)


def _finest(numbers: np.ndarray, type_: str) -> int:
    """Return the least exponent with which all numbers fit a type."""
    largest = float(np.abs(numbers).max(initial=0))
    return int(np.ceil(np.log2(largest / np.iinfo(type_).max))) if largest else 0


def _relu(work: EspLowering, node: ir.Node) -> None:
    """Write a Relu that no layer applies."""
    data = work.integers(node.inputs[0])
    if data.tensor.type == "int8":
        _function(work, node)
        return
    # A table of 16 bits has only every 256th result. The kernel of Relu computes each.
    data = work.requantized(data, work.result(node).scale)
    work.finish(node, "Relu", [data.tensor], data.order)


def _function(work: EspLowering, node: ir.Node) -> None:
    data, function = work.integers(node.inputs[0]), function_of(node)
    if function is None:
        raise CannotLowerError("its parameters are not one constant number")
    result = work.result(node)

    def clipped(numbers: np.ndarray) -> np.ndarray:
        return function(numbers).clip(result.low, result.high)

    output = work.new(str(result.value.name), data.tensor.shape, result.scale)
    work.look_up(data.tensor, output, clipped)
    work.hold(result.value, replace(data, tensor=output))


def _softmax(work: EspLowering, node: ir.Node) -> None:
    data = work.integers(node.inputs[0])
    if data.tensor.type == "int8" and data.tensor.exponent > _SOFTMAX_EXPONENT:
        # The kernel for 16 bits subtracts the largest number first.
        data = work.requantized(data, EspScale("int16", data.tensor.exponent))
    axis = data.order.index(node.attributes.get_int("axis", -1) % len(data.shape))
    value = node.outputs[0]
    tensor = work.float_tensor(str(value.name), data.tensor.shape)
    work.emit("Softmax", (data.tensor,), tensor, {"axis": axis})
    work.hold(value, replace(data, tensor=tensor))


def _pad(work: EspLowering, node: ir.Node) -> None:
    data = work.integers(node.inputs[0])
    if node.attributes.get_string("mode", "constant") != "constant":
        raise CannotLowerError("edgeq writes only the padding with a constant")
    if node_input(node, 3) is not None:
        raise CannotLowerError("it names axes")
    pads = [int(size) for size in work.constant(node.inputs[1])[0]]
    filler = node_input(node, 2)
    number = work.floats(filler).reshape(1) if filler is not None else np.zeros(1)
    scale = EspScale(data.tensor.type, data.tensor.exponent)
    rank = len(data.shape)
    widths = [pads[start + axis] for start in (0, rank) for axis in data.order]
    constant_value = work.quantized(f"{node.name}/filler", number, scale)
    _move(work, node, "Pad", data, data.order, {"mode": "constant"}, (work.numbers(widths), constant_value))


def _slice(work: EspLowering, node: ir.Node) -> None:
    data = work.integers(node.inputs[0])
    starts, ends = (work.constant(node.inputs[place])[0].tolist() for place in (1, 2))
    axes = constant(node_input(node, 3))
    steps = constant(node_input(node, 4))
    axis_list = list(range(len(starts))) if axes is None else [int(axis) % len(data.shape) for axis in axes]
    step_list = [1] * len(starts) if steps is None else [int(step) for step in steps]
    if min(step_list) < 1:
        raise CannotLowerError("it runs backwards")
    # The runtime takes the numbers as they are, so they are brought into the tensor.
    spans = [
        slice(a, b, c).indices(data.shape[x]) for a, b, c, x in zip(starts, ends, step_list, axis_list, strict=True)
    ]
    places = [data.order.index(axis) for axis in axis_list]
    columns = ([a for a, _, _ in spans], [b for _, b, _ in spans], places, step_list)
    _move(work, node, "Slice", data, data.order, {}, tuple(map(work.numbers, columns)))


def _space_to_depth(work: EspLowering, node: ir.Node) -> None:
    """Write one Slice for each place in a block, and join them. The runtime's own operator orders the channels in
    another way than ONNX.
    """
    data, block = _image(work, node), node.attributes.get_int("blocksize")
    _, channels, height, width = data.shape
    shape = (1, height // block, width // block, channels)
    parts = []
    for place in np.ndindex(block, block):
        columns = map(work.numbers, (place, (height, width), (1, 2), (block, block)))
        part = work.fresh(f"{node.name}/part", data.tensor, shape)
        work.emit("Slice", (data.tensor, *columns), part)
        parts.append(part)
    first = replace(data, tensor=parts[0])
    _move(work, node, "Concat", first, data.order, {"axis": _IMAGE - 1}, tuple(parts[1:]))


def _resize(work: EspLowering, node: ir.Node) -> None:
    data = _image(work, node)
    shape = work.sizes(node.outputs[0])
    mode = node.attributes.get_string("mode", "nearest")
    factors = [new / old for new, old in zip(shape[2:], data.shape[2:], strict=True)]
    # For whole factors, all ways to round a place in the input give the same result.
    if mode != "nearest" or any(factor != int(factor) for factor in factors) or shape[:2] != data.shape[:2]:
        raise CannotLowerError("edgeq writes only the enlargement by whole factors in nearest mode")
    attributes: dict[str, Attribute] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    numbers = np.array([1.0, 1.0, *factors], np.float32)
    scales = work.fixed(f"{node.name}/scales", numbers, (0,))
    _move(work, node, "Resize", data, data.order, attributes, (None, scales))


HANDLERS: Mapping[str, Callable[[EspLowering, ir.Node], None]] = {
    "Add": _add,
    "AveragePool": _pool,
    "Concat": _concat,
    "Conv": _conv,
    "Dropout": _identity,
    "Flatten": _reshape,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "Identity": _identity,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Mul": _mul,
    "Pad": _pad,
    "Relu": _relu,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Softmax": _softmax,
    "SpaceToDepth": _space_to_depth,
    "Squeeze": _reshape,
    "Sub": _add,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
    **dict.fromkeys(
        (
            "Clip", "Elu", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "PRelu", "Sigmoid", "Sqrt",
            "Tanh",
        ),
        _function,
    ),
}  # fmt: skip
"""ONNX operator → function that lowers one of its nodes."""
