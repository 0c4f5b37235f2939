"""Which layers a node of the float model becomes, or why it stays in float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.systolic.lower import MOVES, Windows, recognise_move, reshape_move
from edgeq.backends.systolic.network import AddLayer, AverageLayer, ClampLayer, ConvLayer, FcLayer, Layer
from edgeq.backends.systolic.program import Concat, MaxPool, Pads
from edgeq.model.graph import (
    MAIN_DOMAINS,
    attributes,
    clamp_bounds,
    constant,
    is_constant,
    name_of,
    node_input,
    sizes,
)

Found = tuple[Layer, ...] | str
CONSTANT_OPERAND = "one operand is constant"


def recognise(model: ir.Model, node: ir.Node) -> Found:
    """The layers of one node of a model at batch 1 (see `fixed_batch`), or the reason why it has none."""
    if node.domain not in MAIN_DOMAINS:
        return f"{node.domain}.{node.op_type} is not a standard operator"
    made = [value for value in node.outputs if value.name]
    read = [value for value in node.inputs if value is not None and not is_constant(value)]
    if not made or not all(value.dtype == ir.DataType.FLOAT for value in made):
        return "it makes no float32 values"
    for value in (*read, *made):
        if sizes(value) is None:
            return f"the shape of {value.name!r} is not known beforehand"
    if any(_shape(value)[:1] != (1,) for value in (*read, *made)):
        return "its tensors do not have the batch in front"
    if node.op_type in MOVES:
        layers: Found = recognise_move(model, node)
    elif (kind := _KINDS.get(node.op_type)) is not None:
        layers = kind(node)
    else:
        return "neither the array nor its core has an int8 form of this operator; it runs in float on the core"
    if isinstance(layers, str):
        return layers
    return tuple(replace(layer, sources=(_name(node),)) for layer in layers)


def _conv(node: ir.Node) -> Found:
    weights, bias = _constant(node, 1), _constant(node, 2)
    if weights is None or (bias is None and node_input(node, 2) is not None):
        return "its weights are computed, not constant"
    if weights.ndim != 4:
        return f"it is a {weights.ndim - 2}-D convolution; the array's is 2-D"
    windows = Windows.of(node, _shape(node.inputs[0]), (weights.shape[2], weights.shape[3]))
    layer = ConvLayer(
        *_names(node),
        weights.astype(np.float64),
        np.zeros(len(weights)) if bias is None else bias.astype(np.float64),
        node.attributes.get_int("group", 1),
        windows.strides,
        windows.dilations,
        windows.pads,
    )
    return (layer,)


def _gemm(node: ir.Node) -> Found:
    weights = _constant(node, 1)
    if weights is None:
        return "its weights are computed, not constant"
    a = attributes(node)
    if a.get("transA", 0):
        return "its first matrix is transposed"
    rows = (weights if a.get("transB", 0) else weights.T).astype(np.float64) * float(a.get("alpha", 1.0))
    bias = np.zeros(len(rows))
    if node_input(node, 2) is not None:
        addend = _constant(node, 2)
        if addend is None or (addend.ndim > 1 and addend.shape[0] != 1):
            return "its third matrix is not one constant row"
        bias = np.broadcast_to(addend.astype(np.float64).ravel(), (len(rows),)) * float(a.get("beta", 1.0))
    return (FcLayer(*_names(node), rows, bias),)


def _matmul(node: ir.Node) -> Found:
    weights = _constant(node, 1)
    if weights is None or weights.ndim != 2:
        return "it multiplies two activations; the array's weights are constant matrices here"
    rows = weights.T.astype(np.float64)
    return (FcLayer(*_names(node), rows, np.zeros(len(rows))),)


def _add(node: ir.Node) -> Found:
    if len(node.inputs) != 2:
        return f"it adds {len(node.inputs)} tensors; the array adds two"
    left, right = node.inputs
    if is_constant(left) or is_constant(right):
        return CONSTANT_OPERAND
    if _shape(left) != _shape(right):
        return "its operands have different shapes"
    return (AddLayer(_name(node), name_of(left), name_of(right), name_of(node.outputs[0])),)


def _max_pool(node: ir.Node) -> Found:
    if len(node.outputs) > 1 and node.outputs[1].name:
        return "it also outputs the indices of the maxima"
    shape, pooled = _shape(node.inputs[0]), _shape(node.outputs[0])
    if len(shape) != 4:
        return _not_2d(shape)
    if node.attributes.get_int("ceil_mode", 0):
        return "with ceil_mode, its last windows reach further than padding can"
    windows = Windows.of(node, shape)
    pads = _reaching(windows, shape, pooled)
    return (MaxPool(*_names(node), windows.kernel, windows.strides, windows.dilations, pads),)


def _average_pool(node: ir.Node) -> Found:
    shape, pooled = _shape(node.inputs[0]), _shape(node.outputs[0])
    if len(shape) != 4:
        return _not_2d(shape)
    windows = Windows.of(node, shape)
    if windows.dilations != (1, 1):
        return f"it has dilations {list(windows.dilations)}"
    if any(windows.pads) and not node.attributes.get_int("count_include_pad", 0):
        return "windows at the border average fewer values, so that one multiplier does not suffice"
    if _reaching(windows, shape, pooled) != windows.pads:
        return "with ceil_mode, its last windows average fewer values, so that one multiplier does not suffice"
    return (AverageLayer(*_names(node), windows.kernel, windows.strides, windows.pads),)


def _global_average(node: ir.Node) -> Found:
    shape = _shape(node.inputs[0])
    return (_whole_average(*_names(node), shape),) if len(shape) == 4 else _not_2d(shape)


def _reduce_mean(node: ir.Node) -> Found:
    shape = _shape(node.inputs[0])
    a = attributes(node)
    axes = _constant(node, 1) if len(node.inputs) > 1 else a.get("axes")
    if axes is None or len(shape) != 4 or sorted(int(i) % 4 for i in np.ravel(axes)) != [2, 3]:
        return "only a mean over rows and columns has an int8 form"
    name, source, output = _names(node)
    if a.get("keepdims", 1):
        return (_whole_average(name, source, output, shape),)
    pooled = f"{output}/pooled"
    average = _whole_average(name, source, pooled, shape)
    return average, reshape_move(f"{name}/flat", pooled, output, _shape(node.outputs[0]))


def _whole_average(name: str, source: str, output: str, shape: tuple[int, ...]) -> AverageLayer:
    return AverageLayer(name, source, output, (shape[2], shape[3]), (1, 1), (0, 0, 0, 0))


def _clamp(node: ir.Node) -> Found:
    bounds = clamp_bounds(node)
    if bounds is None:
        return "its bounds are computed, not constant"
    if not bounds[0] <= 0 <= bounds[1]:
        return "zero is not between its bounds"
    return (ClampLayer(*_names(node), *bounds),)


def _concat(node: ir.Node) -> Found:
    if any(is_constant(value) for value in node.inputs):
        return "one of its inputs is constant"
    axis = int(attributes(node)["axis"]) % len(_shape(node.outputs[0]))
    if axis == 0:
        return "it joins along the batch"
    return (Concat(_name(node), tuple(map(name_of, node.inputs)), name_of(node.outputs[0]), axis),)


_KINDS: Mapping[str, Callable[[ir.Node], Found]] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "Clip": _clamp,
    "Concat": _concat,
    "Conv": _conv,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "ReduceMean": _reduce_mean,
    "Relu": _clamp,
    "Sum": _add,
}


def _name(node: ir.Node) -> str:
    return node.name or ""


def _names(node: ir.Node) -> tuple[str, str, str]:
    """Of the node, its first input and its first output."""
    return _name(node), name_of(node.inputs[0]), name_of(node.outputs[0])


def _constant(node: ir.Node, place: int) -> NDArray[Any] | None:
    return constant(node_input(node, place))


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    """A shape that `recognise` found to be known."""
    shape = sizes(value)
    assert shape is not None
    return shape


def _not_2d(shape: tuple[int, ...]) -> str:
    return f"it pools {len(shape) - 2}-D data; the integer form is 2-D"


def _reaching(windows: Windows, shape: tuple[int, ...], pooled: tuple[int, ...]) -> Pads:
    """The padding, with more at the bottom and right where the windows of the output reach further (ceil_mode)."""
    top, left, bottom, right = windows.pads
    ends = windows.end_pads(shape, pooled[2:])
    return top, left, max(bottom, ends[0]), max(right, ends[1])
