"""Write a float model as a Q/DQ file whose numbers Rockchip's compiler does not change.

The compiler rounds a tensor again if its zero point is 0. It keeps the scale of a tensor with any other zero point. So
edgeq writes no zero point of 0:

    activations     zero point -1 instead of 0, and scale * 128/127 to keep the range
    weights         zero point -1 or 1, with the integers shifted by the same amount, so the numbers stay the same

Every tensor has a Q/DQ pair, apart from those in `targets/rknn/dialect.toml`. Except for the new scales of the
activations, these changes do not affect what ONNX Runtime's unfused kernels compute from the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.rknn.data import dialect
from edgeq.calibration.ranges import Range
from edgeq.model.edit import Editor, drop_unused_initializers, replace_node
from edgeq.model.graph import (
    channel_axis,
    constant,
    constant_values,
    is_constant,
    is_op,
    maker,
    name_of,
    node_input,
    operator_of,
    readers,
)
from edgeq.model.opset import lower_opset
from edgeq.model.prepare import PreparedModel
from edgeq.model.quant_params import LIMITS
from edgeq.quantization.params import scheme_params
from edgeq.quantization.qdq import write_qdq
from edgeq.scheme import Scheme

# Integers on each side of a symmetric int8 range.
_STEPS = 127
_PAIR = ("QuantizeLinear", "DequantizeLinear")


def write_dialect(
    prepared: PreparedModel,
    ranges: Mapping[str, Range],
    scheme: Scheme,
    paired: Collection[str],
    floats: Collection[str],
) -> ir.Model:
    """Return the quantized model in the compiler's dialect.

    Args:
        paired: names of the nodes that get Q/DQ pairs.
        floats: names of the chosen nodes whose weights stay in float.

    Raises:
        CalibrationError: a tensor has no range.
        ModelError: the model needs an opset that the compiler does not read.
    """
    model = prepared.model.clone()
    # Pools are split before the pairs are written, so that the tensors inside a chain get pairs as well.
    chained = split_pools(model)
    # The quantizer replaces the float constants of these layers, so they are set aside to be put back.
    spared = {name_of(value): value for node in model.graph if node.name in floats for value in _constants(node)}
    write_qdq(
        model,
        off_zero({**ranges, **{new: ranges[old] for new, old in chained.items() if old in ranges}}, scheme),
        scheme,
        {*paired, *(str(n.name) for n in model.graph if n.outputs and name_of(n.outputs[0]) in chained)},
        source=prepared.source,
        weight_bounds=dict(weight_bounds(model, scheme)),
    )
    # Pairs that must go are gone before constants are shifted, so that no constant is shifted in vain.
    restore_floats(model, floats, spared)
    open_swish(model)
    shift_constants(model)
    write_defaults(model)
    # Last, because the steps before it may add operators of the model's own opset.
    lower_opset(model, prepared.source, dialect().opset, "Rockchip's compiler")
    drop_unused_initializers(model.graph)
    return model


def off_zero(ranges: Mapping[str, Range], scheme: Scheme) -> dict[str, Range]:
    """Return `ranges`, but widen each range whose zero point would be 0, so that its zero point is -1."""
    return {name: _off_zero(span, scheme) for name, span in ranges.items()}


def _off_zero(span: Range, scheme: Scheme) -> Range:
    params = scheme_params(span, scheme)
    if params.scale.size != 1 or int(params.zero_point.reshape(())) != dialect().zero_point.avoided:
        return span
    # With zero point -1, the range of -128..127 is -127..128 steps, so a scale of 128/127 keeps the old lower end.
    step = float(params.scale.reshape(())) * 128 / 127
    return Range(-127 * step, 128 * step)


def weight_bounds(model: ir.Model, scheme: Scheme) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the name of each weight that has a channel whose minimum and maximum have about the same magnitude. With
    the name, yield the magnitude that the integer 127 represents in each channel.

    In a channel whose minimum and maximum are that close in magnitude, the largest integer is 126. So no integer
    exceeds 127 after a shift by 1.
    """
    for node in model.graph:
        for place in operator_of(node).weights:
            values = constant(node_input(node, place))
            if values is None or values.dtype != np.float32 or not values.size:
                continue
            axis = channel_axis(node) % values.ndim if scheme.per_channel and values.ndim > 1 else None
            reduced_axes = None if axis is None else tuple(i for i in range(values.ndim) if i != axis)
            low, high = -values.min(axis=reduced_axes, initial=0), values.max(axis=reduced_axes, initial=0)
            largest = np.maximum(low, high).astype(np.float64)
            # Both ends would get the integers -127 and 127, and a shift by 1 would make one of them -128 or 128.
            full = np.minimum(low, high) > largest * (_STEPS - 1) / _STEPS
            if np.any(full & (largest > 0)):
                yield name_of(node.inputs[place]), np.where(full, largest * _STEPS / (_STEPS - 1), largest)


def split_pools(model: ir.Model) -> dict[str, str]:
    """Replace each MaxPool that has stride 1 and a large square window with a chain of MaxPools that have small
    windows, in place.

    Returns:
        The names of the new tensors inside the chains, each with the name of the tensor that the chain pools.
    """
    editor, added = Editor(model), {}
    step = dialect().pool.chained
    # The chain is exact: the maximum over a large window is the maximum over the maxima of small ones.
    for node in [node for node in model.graph if is_op(node, "MaxPool") and _is_centred(node)]:
        source, result = name_of(node.inputs[0]), node.inputs[0]
        count = (node.attributes.get_ints("kernel_shape")[0] - 1) // (step - 1)
        chain = {"kernel_shape": [step, step], "pads": [(step - 1) // 2] * 4, "strides": [1, 1]}
        for place in range(count):
            result = editor.node(
                "MaxPool", [result], f"{node.name}/{place}", before=node, like=node.outputs[0], attributes=chain
            )
            added[name_of(result)] = source
        assert result is not None
        # The last tensor is the pool's own output, which has a range already.
        del added[name_of(result)]
        replace_node(node, result)
        # The pool's name stays in the graph, for exclusions and reports.
        maker(result).name = node.name
    return added


def _is_centred(node: ir.Node) -> bool:
    """Return whether a chain can replace a MaxPool: it has a suitable window, stride 1, and a single output of the same
    size as its input.
    """
    kernel = list(node.attributes.get_ints("kernel_shape"))
    size, step = kernel[0], dialect().pool.chained
    required = {"kernel_shape": [size] * 2, "strides": [1] * 2, "dilations": [1] * 2, "pads": [(size - 1) // 2] * 4}
    attributes = {name: list(node.attributes.get_ints(name, [1, 1])) for name in required}
    floor_mode = node.attributes.get_int("ceil_mode", 0) == 0 and len(node.outputs) == 1
    return floor_mode and attributes == required and size in dialect().pool.windows and (size - 1) % (step - 1) == 0


def restore_floats(model: ir.Model, floats: Collection[str], spared: Mapping[str, ir.Value]) -> None:
    """Replace, in place, the integer weights of the nodes in `floats` with their float weights."""
    editor = Editor(model)
    for node in model.graph:
        if node.name not in floats:
            continue
        for place, value in enumerate(node.inputs):
            restored = value.producer() if value is not None else None
            if restored is None or not is_op(restored, "DequantizeLinear") or not is_constant(restored.inputs[0]):
                continue
            # The quantizer's name for the integers of a constant.
            name = name_of(restored.inputs[0]).removesuffix("_quantized")
            values = constant(spared.get(name))
            if values is not None:
                node.replace_input_with(place, editor.constant(name, values))
    _remove_unread(model)


def open_swish(model: ir.Model) -> None:
    """Remove, in place, the Q/DQ pair between a Sigmoid and a Mul that read the same tensor. The compiler merges both
    into one operator, which rounds once.
    """
    for node in [node for node in model.graph if is_op(node, *dialect().swish.gates)]:
        gate = node.outputs[0]
        pairs = [reader for reader in readers(gate) if is_op(reader, "QuantizeLinear")]
        if len(pairs) != 1 or len(gate.uses()) != 1:
            continue
        restored = [reader for reader in readers(pairs[0].outputs[0]) if is_op(reader, "DequantizeLinear")]
        behind = [reader for dequantize in restored for reader in readers(dequantize.outputs[0])]
        source = node.inputs[0]
        if not restored or not behind or any(dequantize.outputs[0].is_graph_output() for dequantize in restored):
            continue
        # Another reader would still get the pair's numbers on the NPU, so the pair stays for it.
        if all(is_op(reader, "Mul") and source in reader.inputs for reader in behind):
            for dequantize in restored:
                dequantize.outputs[0].replace_all_uses_with(gate)
    _remove_unread(model)


def shift_constants(model: ir.Model) -> None:
    """Replace, in place, every zero point of 0 of an 8-bit constant. The constants still represent the same numbers."""
    editor = Editor(model)
    shifted_constants: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in [node for node in model.graph if is_op(node, "DequantizeLinear")]:
        integers, zero = node.inputs[0], node_input(node, 2)
        if integers is None or not is_constant(integers) or integers.dtype is not ir.DataType.INT8:
            continue
        # Layers may share a constant. It is shifted once, or the second layer would shift it back.
        if integers not in shifted_constants:
            values = constant_values(integers)
            zeros = np.zeros(constant_values(node.inputs[1]).shape, np.int8) if zero is None else constant_values(zero)
            shift = shifts(values, zeros, node.attributes.get_int("axis", 1))
            if not shift.any():
                continue
            name, spread = name_of(integers), _spread(shift, values.ndim, node.attributes.get_int("axis", 1))
            shifted = (values.astype(np.int16) + spread).astype(np.int8)
            points = (zeros.astype(np.int16) + shift).astype(np.int8)
            shifted_constants[integers] = (
                editor.constant(f"{name}/shifted", shifted),
                editor.constant(f"{name}/zero_point", points),
            )
        moved, point = shifted_constants[integers]
        node.replace_input_with(0, moved)
        if zero is None:
            # A DequantizeLinear without a zero point means 0, the very value that must not be there.
            node.resize_inputs(3)
        node.replace_input_with(2, point)


def shifts(values: NDArray[np.int8], zeros: NDArray[np.int8], axis: int) -> NDArray[np.int16]:
    """Return for each channel the number to add to its integers and to its zero point, so that no zero point is 0.

    The number is -1 or 1. Adding it moves the integer with the largest magnitude towards 0. So no integer becomes -128,
    unless a channel contains both -127 and 127. This matters because some kernels of ONNX Runtime on ARM multiply -128
    wrongly. By contrast, a channel that uses all 256 integers keeps its zero point, because its integers cannot be
    shifted.
    """
    low, high = LIMITS[ir.DataType.INT8]
    flat = values.reshape(1, -1) if not zeros.ndim else np.moveaxis(values, axis, 0).reshape(zeros.size, -1)
    smallest = flat.min(axis=1, initial=high).astype(np.int16)
    largest = flat.max(axis=1, initial=low).astype(np.int16)
    up = np.where(largest < high, 1, np.where(smallest > low, -1, 0))
    down = np.where(smallest > low, -1, np.where(largest < high, 1, 0))
    towards_zero = np.where(-smallest > largest, up, down).reshape(zeros.shape)
    return np.where(zeros == dialect().zero_point.avoided, towards_zero, 0).astype(np.int16)


def _spread(shift: NDArray[np.int16], rank: int, axis: int) -> NDArray[np.int16]:
    if not shift.ndim:
        return shift
    shape = [1] * rank
    shape[axis % rank] = shift.size
    return shift.reshape(shape)


def write_defaults(model: ir.Model) -> None:
    """Write, in place, the attributes that the compiler requires, and remove those that it cannot handle."""
    for node in model.graph:
        for rule in dialect().attribute:
            if not is_op(node, rule.operator):
                continue
            if rule.write is not None and rule.name not in node.attributes:
                node.attributes[rule.name] = ir.convenience.convert_attribute(rule.name, rule.write)
            elif rule.write is None and node.attributes.get_int(rule.name, -1) == 0:
                node.attributes.pop(rule.name)


def _constants(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None and is_constant(value))


def _remove_unread(model: ir.Model) -> None:
    # From the end, so that a QuantizeLinear loses its last reader before its own turn.
    for node in reversed(list(model.graph)):
        if is_op(node, *_PAIR) and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            model.graph.remove(node, safe=True)
