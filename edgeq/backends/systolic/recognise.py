"""Which layers a node of the float model becomes, or why it stays in float."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from edgeq.backends.systolic.graph import Graph, attributes, text
from edgeq.backends.systolic.moves import MOVES, recognise_move, reshape_move
from edgeq.backends.systolic.network import (
    AddLayer,
    AverageLayer,
    ClampLayer,
    ConcatLayer,
    ConvLayer,
    FcLayer,
    Layer,
    MaxPoolLayer,
    Pads,
    Pair,
)

Found = tuple[Layer, ...] | str


def recognise(graph: Graph, node: onnx.NodeProto) -> Found:
    """The layers of one node, or the reason why it has none."""
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}.{node.op_type} is not a standard operator"
    made = [name for name in node.output if name]
    read = [name for name in node.input if name and name not in graph.constants]
    if not made or not all(graph.is_float(name) for name in made):
        return "it makes no float32 values"
    unknown = next((name for name in (*read, *made) if name not in graph.shapes), None)
    if unknown is not None:
        return f"the shape of {unknown!r} is not known beforehand"
    if any(not graph.shapes[name] or graph.shapes[name][0] != 1 for name in (*read, *made)):
        return "its tensors do not have the batch in front"
    if node.op_type in MOVES:
        return recognise_move(graph, node)
    kind = _KINDS.get(node.op_type)
    if kind is None:
        return "neither the array nor its core has an int8 form of this operator; it runs in float on the core"
    return kind(graph, node)


def _conv(graph: Graph, node: onnx.NodeProto) -> Found:
    weights, bias = graph.constant(node, 1), graph.constant(node, 2)
    if weights is None or (len(node.input) > 2 and node.input[2] and bias is None):
        return "its weights are computed, not constant"
    if weights.ndim != 4:
        return f"it is a {weights.ndim - 2}-D convolution; the array's is 2-D"
    a = attributes(node)
    strides, dilations = _pair(a.get("strides")), _pair(a.get("dilations"))
    kernel = (weights.shape[2], weights.shape[3])
    pads = _pads(a, graph.shapes[node.input[0]], kernel, strides, dilations)
    outputs = weights.shape[0]
    layer = ConvLayer(
        node.name,
        node.input[0],
        node.output[0],
        weights.astype(np.float64),
        np.zeros(outputs) if bias is None else bias.astype(np.float64),
        int(a.get("group", 1)),
        strides,
        dilations,
        pads,
        sources=(node.name,),
    )
    return (layer,)


def _gemm(graph: Graph, node: onnx.NodeProto) -> Found:
    weights = graph.constant(node, 1)
    if weights is None:
        return "its weights are computed, not constant"
    a = attributes(node)
    if a.get("transA", 0):
        return "its first matrix is transposed"
    rows = (weights if a.get("transB", 0) else weights.T).astype(np.float64) * float(a.get("alpha", 1.0))
    bias = np.zeros(len(rows))
    if len(node.input) > 2 and node.input[2]:
        addend = graph.constant(node, 2)
        if addend is None or (addend.ndim > 1 and addend.shape[0] != 1):
            return "its third matrix is not one constant row"
        bias = np.broadcast_to(addend.astype(np.float64).ravel(), (len(rows),)) * float(a.get("beta", 1.0))
    return (FcLayer(node.name, node.input[0], node.output[0], rows, bias, sources=(node.name,)),)


def _matmul(graph: Graph, node: onnx.NodeProto) -> Found:
    weights = graph.constant(node, 1)
    if weights is None or weights.ndim != 2:
        return "it multiplies two activations; the array's weights are constant matrices here"
    rows = weights.T.astype(np.float64)
    return (FcLayer(node.name, node.input[0], node.output[0], rows, np.zeros(len(rows)), sources=(node.name,)),)


def _add(graph: Graph, node: onnx.NodeProto) -> Found:
    if len(node.input) != 2:
        return f"it adds {len(node.input)} tensors; the array adds two"
    left, right = node.input
    if left in graph.constants or right in graph.constants:
        return "one operand is constant"
    if graph.shapes[left] != graph.shapes[right]:
        return "its operands have different shapes"
    return (AddLayer(node.name, left, right, node.output[0], sources=(node.name,)),)


def _max_pool(graph: Graph, node: onnx.NodeProto) -> Found:
    if len(node.output) > 1 and node.output[1]:
        return "it also gives the places of the maxima"
    shape, pooled = graph.shapes[node.input[0]], graph.shapes[node.output[0]]
    if len(shape) != 4:
        return f"it pools {len(shape) - 2}-D data; the integer form is 2-D"
    a = attributes(node)
    kernel, strides, dilations = _pair(a["kernel_shape"]), _pair(a.get("strides")), _pair(a.get("dilations"))
    pads = _pads(a, shape, kernel, strides, dilations)
    layer = MaxPoolLayer(
        node.name,
        node.input[0],
        node.output[0],
        kernel,
        strides,
        dilations,
        _reaching(pads, shape, pooled, kernel, strides, dilations),
        sources=(node.name,),
    )
    return (layer,)


def _average_pool(graph: Graph, node: onnx.NodeProto) -> Found:
    shape, pooled = graph.shapes[node.input[0]], graph.shapes[node.output[0]]
    if len(shape) != 4:
        return f"it pools {len(shape) - 2}-D data; the integer form is 2-D"
    a = attributes(node)
    kernel, strides, dilations = _pair(a["kernel_shape"]), _pair(a.get("strides")), _pair(a.get("dilations"))
    if dilations != (1, 1):
        return f"it has dilations {list(dilations)}"
    pads = _pads(a, shape, kernel, strides, dilations)
    if any(pads) and not a.get("count_include_pad", 0):
        return "windows at the border average fewer values, so that one multiplier does not do"
    if _reaching(pads, shape, pooled, kernel, strides, dilations) != pads:
        return "with ceil_mode, its last windows average fewer values, so that one multiplier does not do"
    return (AverageLayer(node.name, node.input[0], node.output[0], kernel, strides, pads, sources=(node.name,)),)


def _global_average(graph: Graph, node: onnx.NodeProto) -> Found:
    shape = graph.shapes[node.input[0]]
    if len(shape) != 4:
        return f"it pools {len(shape) - 2}-D data; the integer form is 2-D"
    return (_whole_average(node, node.output[0], shape),)


def _reduce_mean(graph: Graph, node: onnx.NodeProto) -> Found:
    shape = graph.shapes[node.input[0]]
    a = attributes(node)
    given = graph.constant(node, 1) if len(node.input) > 1 else a.get("axes")
    if given is None or len(shape) != 4 or sorted(int(i) % 4 for i in np.ravel(given)) != [2, 3]:
        return "only a mean over rows and columns has an int8 form"
    if a.get("keepdims", 1):
        return (_whole_average(node, node.output[0], shape),)
    pooled = f"{node.output[0]}/pooled"
    average = _whole_average(node, pooled, shape)
    return average, reshape_move(f"{node.name}/flat", pooled, node.output[0], graph.shapes[node.output[0]], node.name)


def _whole_average(node: onnx.NodeProto, output: str, shape: tuple[int, ...]) -> AverageLayer:
    kernel = (shape[2], shape[3])
    return AverageLayer(node.name, node.input[0], output, kernel, (1, 1), (0, 0, 0, 0), sources=(node.name,))


def _relu(graph: Graph, node: onnx.NodeProto) -> Found:
    return (ClampLayer(node.name, node.input[0], node.output[0], 0.0, math.inf, sources=(node.name,)),)


def _clip(graph: Graph, node: onnx.NodeProto) -> Found:
    a = attributes(node)
    bounds = [float(a.get("min", -math.inf)), float(a.get("max", math.inf))]
    for place in (1, 2):
        if len(node.input) > place and node.input[place]:
            value = graph.constant(node, place)
            if value is None or value.size != 1:
                return "its bounds are computed, not constant"
            bounds[place - 1] = float(value.reshape(()))
    low, high = bounds
    if not low <= 0 <= high:
        return "zero is not between its bounds"
    return (ClampLayer(node.name, node.input[0], node.output[0], low, high, sources=(node.name,)),)


def _concat(graph: Graph, node: onnx.NodeProto) -> Found:
    if any(name in graph.constants for name in node.input):
        return "one of its inputs is constant"
    axis = int(attributes(node)["axis"]) % len(graph.shapes[node.output[0]])
    if axis == 0:
        return "it joins along the batch"
    return (ConcatLayer(node.name, tuple(node.input), node.output[0], axis, sources=(node.name,)),)


_KINDS: dict[str, Callable[[Graph, onnx.NodeProto], Found]] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "ReduceMean": _reduce_mean,
    "Relu": _relu,
    "Sum": _add,
}


def _pair(values: Any) -> Pair:
    return (int(values[0]), int(values[1])) if values else (1, 1)


def _pads(a: dict[str, Any], shape: tuple[int, ...], kernel: Pair, strides: Pair, dilations: Pair) -> Pads:
    """(top, left, bottom, right), auto_pad worked out."""
    mode = text(a.get("auto_pad"), "NOTSET")
    if mode == "VALID":
        return (0, 0, 0, 0)
    if mode == "NOTSET":
        top, left, bottom, right = a.get("pads") or (0, 0, 0, 0)
        return int(top), int(left), int(bottom), int(right)
    before, after = [], []
    for size, k, stride, dilation in zip(shape[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before[0], before[1], after[0], after[1]


def _reaching(
    pads: Pads, shape: tuple[int, ...], pooled: tuple[int, ...], kernel: Pair, strides: Pair, dilations: Pair
) -> Pads:
    """`pads`, with more at the bottom and right where the windows of the output reach further (ceil_mode)."""
    ends = []
    for axis in (0, 1):
        last = (pooled[2 + axis] - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1
        ends.append(max(pads[2 + axis], last - shape[2 + axis] - pads[axis]))
    return pads[0], pads[1], ends[0], ends[1]
