"""Find the int8 layers that replace a node of the float model, or the reason why the node stays in float."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic import program as steps
from edgeq.backends.systolic.program import Layer, Pads, Pair
from edgeq.model.convert import to_bytes
from edgeq.model.graph import (
    DATA_MOVEMENT,
    MAIN_DOMAINS,
    attributes,
    clamp_bounds,
    constant,
    geometry,
    is_constant,
    name_of,
    node_input,
    sizes,
)
from edgeq.model.parts import part_of
from edgeq.model.sessions import open_in_memory
from edgeq.run.session import SessionSettings

Recognition = tuple[Layer, ...] | str
# `build` compares reasons with this text: an Add with this reason may still become a bias.
CONSTANT_OPERAND = "one operand is constant"


def recognise(model: ir.Model, node: ir.Node) -> Recognition:
    """Return the int8 layers of one node, or the reason why the node stays in float.

    Args:
        model: a model at batch 1 (see `fixed_batch`).
    """
    if node.domain not in MAIN_DOMAINS:
        return f"{node.domain}.{node.op_type} is not a standard operator"
    outputs = [value for value in node.outputs if value.name]
    activations = [value for value in node.inputs if value is not None and not is_constant(value)]
    if not outputs or not all(value.dtype == ir.DataType.FLOAT for value in outputs):
        return "it does not output float32 values"
    # The array's program has fixed addresses.
    for value in (*activations, *outputs):
        if sizes(value) is None:
            return f"the shape of {value.name!r} is not fixed"
    if any(_shape(value)[:1] != (1,) for value in (*activations, *outputs)):
        return "its tensors do not have the batch in front"
    if node.op_type in MOVES:
        layers: Recognition = recognise_move(model, node)
    elif (kind := _KINDS.get(node.op_type)) is not None:
        layers = kind(node)
    else:
        return "neither the array nor its core has an int8 form of this operator; it runs in float on the core"
    if isinstance(layers, str):
        return layers
    return tuple(replace(layer, sources=(_name(node),)) for layer in layers)


def _conv(node: ir.Node) -> Recognition:
    weights, bias = _constant(node, 1), _constant(node, 2)
    if weights is None or (bias is None and node_input(node, 2) is not None):
        return "its weights are computed, not constant"
    if weights.ndim != 4:
        return f"it is a {weights.ndim - 2}-D convolution; the array's is 2-D"
    windows = Windows.of(node, _shape(node.inputs[0]), (weights.shape[2], weights.shape[3]))
    # float64 until the integers are chosen: folded biases and offsets must not add roundings.
    exact = weights.astype(np.float64), np.zeros(len(weights)) if bias is None else bias.astype(np.float64)
    groups = node.attributes.get_int("group", 1)
    return (steps.Conv(*_names(node), *exact, groups, windows.strides, windows.dilations, windows.pads),)


def _product(node: ir.Node) -> Recognition:
    weights, a = _constant(node, 1), attributes(node)
    if node.op_type == "MatMul" and (weights is None or weights.ndim != 2):
        return "it multiplies two activations; the array's weights are constant matrices here"
    if weights is None:
        return "its weights are computed, not constant"
    if a.get("transA", 0):
        return "its first matrix is transposed"
    rows = (weights if a.get("transB", 0) else weights.T).astype(np.float64) * float(a.get("alpha", 1.0))
    bias = np.zeros(len(rows))
    if node_input(node, 2) is not None:
        addend = _constant(node, 2)
        if addend is None or (addend.ndim > 1 and addend.shape[0] != 1):
            return "its third matrix is not one constant row"
        bias = np.broadcast_to(addend.astype(np.float64).ravel(), (len(rows),)) * float(a.get("beta", 1.0))
    return (steps.Fc(*_names(node), rows, bias),)


def _add(node: ir.Node) -> Recognition:
    if len(node.inputs) != 2:
        return f"it adds {len(node.inputs)} tensors; the array adds two"
    lhs, rhs = node.inputs
    if is_constant(lhs) or is_constant(rhs):
        return CONSTANT_OPERAND
    if _shape(lhs) != _shape(rhs):
        return "its operands have different shapes"
    return (steps.ResidualAdd(_name(node), name_of(lhs), name_of(rhs), name_of(node.outputs[0])),)


def _max_pool(node: ir.Node) -> Recognition:
    if len(node.outputs) > 1 and node.outputs[1].name:
        return "it also outputs the indices of the maxima"
    shape, pooled = _shape(node.inputs[0]), _shape(node.outputs[0])
    if len(shape) != 4:
        return _not_2d(shape)
    if node.attributes.get_int("ceil_mode", 0):
        return "with ceil_mode, its last windows reach further than padding can"
    windows = Windows.of(node, shape)
    pads = _reaching(windows, shape, pooled)
    return (steps.MaxPool(*_names(node), windows.kernel, windows.strides, windows.dilations, pads),)


def _average_pool(node: ir.Node) -> Recognition:
    shape, pooled = _shape(node.inputs[0]), _shape(node.outputs[0])
    if len(shape) != 4:
        return _not_2d(shape)
    windows = Windows.of(node, shape)
    if windows.dilations != (1, 1):
        return f"it has dilations {list(windows.dilations)}"
    if any(windows.pads) and not node.attributes.get_int("count_include_pad", 0):
        return "windows at the border average fewer values, so one multiplier is not enough"
    if _reaching(windows, shape, pooled) != windows.pads:
        return "with ceil_mode, its last windows average fewer values, so one multiplier is not enough"
    return (steps.AveragePool(*_names(node), windows.kernel, windows.strides, windows.pads),)


def _mean(node: ir.Node) -> Recognition:
    """Return the layers of a mean over rows and columns. A ReduceMean may drop those axes."""
    shape, a = _shape(node.inputs[0]), attributes(node)
    name, source, output = _names(node)
    if node.op_type == "GlobalAveragePool" and len(shape) != 4:
        return _not_2d(shape)
    if node.op_type == "ReduceMean":
        axes = _constant(node, 1) if len(node.inputs) > 1 else a.get("axes")
        if axes is None or len(shape) != 4 or sorted(int(i) % 4 for i in np.ravel(axes)) != [2, 3]:
            return "only a mean over rows and columns has an int8 form"
    # A ReduceMean may drop its axes: the average keeps them, and a reshape behind it drops them.
    pooled = output if a.get("keepdims", 1) else f"{output}/pooled"
    average = steps.AveragePool(name, source, pooled, (shape[2], shape[3]), (1, 1), (0, 0, 0, 0))
    if pooled == output:
        return (average,)
    return average, reshape_move(f"{name}/flat", pooled, output, _shape(node.outputs[0]))


def _clamp(node: ir.Node) -> Recognition:
    bounds = clamp_bounds(node)
    if bounds is None:
        return "its bounds are computed, not constant"
    # Zero is the value of padding and of an idle channel, and must survive a clamp.
    if not bounds[0] <= 0 <= bounds[1]:
        return "zero is not between its bounds"
    return (steps.Clamp(*_names(node), *bounds),)


def _concat(node: ir.Node) -> Recognition:
    if any(is_constant(value) for value in node.inputs):
        return "one of its inputs is constant"
    axis = int(attributes(node)["axis"]) % len(_shape(node.outputs[0]))
    if axis == 0:
        return "it joins along the batch"
    return (steps.Concat(_name(node), tuple(map(name_of, node.inputs)), name_of(node.outputs[0]), axis),)


_KINDS: Mapping[str, Callable[[ir.Node], Recognition]] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "Clip": _clamp,
    "Concat": _concat,
    "Conv": _conv,
    "Gemm": _product,
    "GlobalAveragePool": _mean,
    "MatMul": _product,
    "MaxPool": _max_pool,
    "ReduceMean": _mean,
    "Relu": _clamp,
    "Sum": _add,
}


def _name(node: ir.Node) -> str:
    return node.name or ""


def _names(node: ir.Node) -> tuple[str, str, str]:
    """Return the names of the node, its first input and its first output."""
    return _name(node), name_of(node.inputs[0]), name_of(node.outputs[0])


def _constant(node: ir.Node, place: int) -> NDArray[Any] | None:
    return constant(node_input(node, place))


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    """Return a tensor's shape. `recognise` has already checked that it is known."""
    shape = sizes(value)
    assert shape is not None
    return shape


def _not_2d(shape: tuple[int, ...]) -> str:
    return f"it pools {len(shape) - 2}-D data; the integer form is 2-D"


def _reaching(windows: Windows, shape: tuple[int, ...], pooled: tuple[int, ...]) -> Pads:
    """Return the windows' padding, enlarged at the bottom and right if the output has windows that reach further
    (ceil_mode).
    """
    top, left, bottom, right = windows.pads
    ends = windows.end_pads(shape, pooled[2:])
    return top, left, max(bottom, ends[0]), max(right, ends[1])


# MaxPool is left out: which elements it selects depends on the values, and the array has its own steps for it.
MOVES = DATA_MOVEMENT - {"MaxPool"}
# Positions are tracked as float32, which holds every whole number up to here.
_EXACT = 2**24
# The dialect's opset, so the part needs no conversion there.
_RESHAPE_OPSET = 13
# The dialect's format version.
_RESHAPE_IR = 7


def recognise_move(model: ir.Model, node: ir.Node) -> tuple[steps.Rearrange, ...] | str:
    """Return the layers of a node of `MOVES`, one for each output, or the reason why the node stays in float."""
    source = node.inputs[0]
    if source is None or is_constant(source) or source.dtype != ir.DataType.FLOAT:
        return "it moves no activations"
    if any(value is not None and not is_constant(value) for value in node.inputs[1:]):
        return "the positions that it moves values to are computed, not constant"
    problem = _rescales(node)
    if problem:
        return problem
    shape = sizes(source)
    assert shape is not None
    outputs = tuple(value for value in node.outputs if value.name)
    if math.prod(shape) >= _EXACT:
        return "it moves too many values for edgeq to track"
    # Run the node on the positions of the values, to see where each value moves.
    places = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    session = open_in_memory(part_of(model, [node], [source], outputs), SessionSettings(optimization="none"))
    moved = session.run([name_of(value) for value in outputs], {name_of(source): places})
    layers = []
    for number, (output, values) in enumerate(zip(outputs, moved, strict=True)):
        name = node.name or "" if len(outputs) == 1 else f"{node.name}/{number}"
        # Positions count from 1, so a 0 that the node wrote itself becomes -1.
        index = values.astype(np.int32).ravel() - 1
        if index.size == places.size and np.array_equal(index, np.arange(index.size)):
            layers.append(reshape_move(name, name_of(source), name_of(output), values.shape))
            continue
        part = to_bytes(part_of(model, [node], [source], [output]))
        layers.append(steps.Rearrange(name, name_of(source), name_of(output), index, part))
    return tuple(layers)


def reshape_move(name: str, source: str, output: str, shape: tuple[int, ...]) -> steps.Rearrange:
    """Return a layer that reshapes each sample to `shape`, which has batch 1 as first axis."""
    # 0 keeps the batch, which is not 1 when several samples run at once.
    target = ir.tensor(np.array([0, *shape[1:]], np.int64), name=f"{name}/shape")
    source_value, output_value = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT)) for n in (source, output))
    size = ir.Value(name=target.name, const_value=target)
    reshape = ir.Node("", "Reshape", [source_value, size], outputs=[output_value], name=name)
    opsets = {"": _RESHAPE_OPSET}
    graph = ir.Graph(
        [source_value], [output_value], nodes=[reshape], initializers=[size], opset_imports=opsets, name="part"
    )
    return steps.Rearrange(name, source, output, None, to_bytes(ir.Model(graph, ir_version=_RESHAPE_IR)))


def _rescales(node: ir.Node) -> str:
    """Return why a node does more than move values; "" if it only moves them."""
    if node.op_type == "Pad" and node.attributes.get_string("mode", "constant") == "constant":
        value = constant(node_input(node, 2))
        if value is not None and value.size and float(value.reshape(-1)[0]) != 0:
            return "it pads with a value other than zero"
    if node.op_type == "Resize" and (mode := node.attributes.get_string("mode", "nearest")) != "nearest":
        return f"its mode is {mode}; only nearest works on integers"
    crops = node.attributes.get_string("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    if crops and node.attributes.get_float("extrapolation_value", 0.0) != 0:
        return "it fills in a value other than zero outside the image"
    return ""


@dataclass(frozen=True)
class Windows:
    """Describe how windows cover an image. Pairs are (rows, columns).

    Attributes:
        pads: (top, left, bottom, right).
    """

    kernel: Pair
    strides: Pair
    dilations: Pair
    pads: Pads

    @classmethod
    def of(cls, node: ir.Node, shape: tuple[int, ...], kernel: Pair | None = None) -> Windows:
        """Return the windows of a 2-D convolution or pooling, with auto_pad resolved.

        Args:
            shape: the input's shape, [1, C, H, W].
            kernel: the size of a convolution's weights; None uses the attribute kernel_shape.
        """
        kernel = kernel or _pair(attributes(node)["kernel_shape"])
        resolved = geometry(node, shape[2:], kernel)
        (top, bottom), (left, right) = resolved.pads
        return cls(kernel, _pair(resolved.strides), _pair(resolved.dilations), (top, left, bottom, right))

    @property
    def regular(self) -> bool:
        """Return whether the array's convolution calls support these windows.

        The windows must be square, with equal strides, no dilation, and four equal pads smaller than the kernel.
        """
        square = self.kernel[0] == self.kernel[1] and self.strides[0] == self.strides[1] and len(set(self.pads)) == 1
        return square and self.dilations == (1, 1) and self.pads[0] < self.kernel[0]

    def rounded_up(self, shape: tuple[int, ...]) -> Pair:
        """Return the number of rows and columns of the output with ceil_mode.

        No window may start beyond the input and its leading padding.
        """
        counts = []
        for axis in (0, 1):
            padded, stride = shape[2 + axis] + self.pads[axis], self.strides[axis]
            extent = padded + self.pads[2 + axis] - (self.kernel[axis] - 1) * self.dilations[axis] - 1
            count = -(-extent // stride)
            counts.append((count if count * stride < padded else count - 1) + 1)
        return counts[0], counts[1]

    def end_pads(self, shape: tuple[int, ...], size: tuple[int, ...]) -> Pair:
        """Return the padding at the bottom and right that is necessary for an output of `size`."""
        ends = []
        for axis in (0, 1):
            reach = (size[axis] - 1) * self.strides[axis] + (self.kernel[axis] - 1) * self.dilations[axis] + 1
            ends.append(max(reach - shape[2 + axis] - self.pads[axis], 0))
        return ends[0], ends[1]


def _pair(values: Sequence[int]) -> Pair:
    rows, columns = values
    return rows, columns
