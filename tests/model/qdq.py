"""Build small Q/DQ models with one operator each, as a static quantizer writes them, to check the int8 rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 21


@dataclass(frozen=True)
class Probe:
    """Describe one float operator: the shapes of its float inputs, its constants in order, its attributes.

    The graph quantizes `weights` to int8 and dequantizes them. `extras` (shapes, axes, indices) stay as they are.
    """

    op_type: str
    inputs: tuple[tuple[int, ...], ...] = ((1, 4, 8, 8),)
    weights: tuple[tuple[int, ...], ...] = ()
    bias: int | None = None
    extras: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    order: Callable[[list[str], list[str], list[str]], list[str]] | None = None
    same_scale: bool = False


def build(
    probe: Probe, *, activation: str = "uint8", weight: str = "int8", zero: int = 128, float_result: bool = False
) -> onnx.ModelProto:
    """Return DequantizeLinear → the operator → QuantizeLinear, with float inputs and outputs of the graph.

    Args:
        float_result: whether the result of the operator stays in float.
        zero: zero point of uint8 activations; for int8 it is 128 lower.
    """
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []
    act_dtype = np.dtype(activation).type
    zero_point = act_dtype(zero if activation == "uint8" else zero - 128)

    def constant(name: str, value: Any) -> str:
        initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    constant("in_scale", np.float32(0.02))
    constant("out_scale", np.float32(0.02 if probe.same_scale else 0.05))
    constant("zero", zero_point)

    def pair(source: str, target: str, scale: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [source, scale, "zero"], [f"{target}_q"], name=f"{target}_q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{target}_q", scale, "zero"], [target], name=f"{target}_d"))
        return target

    data = [pair(f"x{i}", f"x{i}_float", "in_scale") for i in range(len(probe.inputs))]
    rng = np.random.default_rng(0)
    weights = []
    for i, shape in enumerate(probe.weights):
        q = rng.integers(1, 100, size=shape).astype(weight)
        constant(f"w{i}_q", q)
        constant(f"w{i}_scale", np.float32(0.01))
        constant(f"w{i}_zero", np.dtype(weight).type(0))
        nodes.append(
            helper.make_node("DequantizeLinear", [f"w{i}_q", f"w{i}_scale", f"w{i}_zero"], [f"w{i}"], name=f"w{i}_d")
        )
        weights.append(f"w{i}")
    if probe.bias is not None:
        constant("b_q", np.arange(probe.bias, dtype=np.int32))
        constant("b_scale", np.float32(0.0002))
        constant("b_zero", np.int32(0))
        nodes.append(helper.make_node("DequantizeLinear", ["b_q", "b_scale", "b_zero"], ["b"], name="b_d"))
        weights.append("b")
    extras = [constant(f"e{i}", e) if e is not None else "" for i, e in enumerate(probe.extras)]
    names = probe.order(data, weights, extras) if probe.order else [*data, *weights, *extras]
    outputs = [f"y{i}" if float_result else f"y{i}_float" for i in range(probe.outputs)]
    nodes.append(helper.make_node(probe.op_type, names, outputs, name="probe", **probe.attributes))
    for i in range(0 if float_result else probe.outputs):
        pair(f"y{i}_float", f"y{i}", "out_scale")
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, list(s)) for i, s in enumerate(probe.inputs)],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(probe.outputs)],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def _first_extra_last(data: list[str], weights: list[str], extras: list[str]) -> list[str]:
    return [*extras, *data, *weights]


_I = np.int64
PROBES: dict[str, Probe] = {
    p.op_type: p
    for p in (
        Probe("Conv", weights=((6, 4, 3, 3),), bias=6, attributes={"pads": [1, 1, 1, 1]}),
        Probe("ConvTranspose", weights=((4, 6, 3, 3),), bias=6),
        Probe("MatMul", ((4, 8),), weights=((8, 6),)),
        Probe("Gemm", ((4, 8),), weights=((8, 6),), bias=6),
        Probe("Add", ((1, 4, 8, 8),) * 2),
        Probe("Sub", ((1, 4, 8, 8),) * 2),
        Probe("Mul", ((1, 4, 8, 8),) * 2),
        Probe("Div", ((1, 4, 8, 8),) * 2),
        Probe("Max", ((1, 4, 8, 8),) * 2),
        Probe("Min", ((1, 4, 8, 8),) * 2),
        Probe("Concat", ((1, 4, 8, 8),) * 2, attributes={"axis": 1}),
        Probe("Where", ((1, 4),) * 2, extras=(np.array([[True, False, True, False]]),), order=_first_extra_last),
        Probe("Relu", same_scale=True),
        Probe("Clip", extras=(np.float32(0), np.float32(6)), same_scale=True),
        Probe("LeakyRelu", attributes={"alpha": 0.1}),
        Probe("PRelu", weights=((4, 1, 1),)),
        Probe("Elu"),
        Probe("Gelu"),
        Probe("HardSigmoid"),
        Probe("HardSwish"),
        Probe("Mish"),
        Probe("Softplus"),
        Probe("Sigmoid"),
        Probe("Tanh"),
        Probe("Erf"),
        Probe("Exp"),
        Probe("Log"),
        Probe("Sqrt"),
        Probe("Pow", extras=(np.float32(2),)),
        Probe("Neg"),
        Probe("Abs"),
        Probe("Softmax", ((1, 16),), attributes={"axis": -1}),
        Probe("LogSoftmax", ((1, 16),), attributes={"axis": -1}),
        Probe("AveragePool", attributes={"kernel_shape": [2, 2]}),
        Probe("GlobalAveragePool"),
        Probe("MaxPool", attributes={"kernel_shape": [2, 2]}, same_scale=True),
        Probe("GlobalMaxPool", same_scale=True),
        Probe("LpPool", attributes={"kernel_shape": [2, 2]}),
        Probe("ReduceMean", extras=(np.array([2, 3], _I),)),
        Probe("ReduceSum", extras=(np.array([2, 3], _I),)),
        Probe("ReduceMax", extras=(np.array([2, 3], _I),), same_scale=True),
        Probe("ReduceMin", extras=(np.array([2, 3], _I),), same_scale=True),
        Probe("Reshape", extras=(np.array([1, -1], _I),), same_scale=True),
        Probe("Flatten", same_scale=True),
        Probe("Squeeze", ((1, 4, 1, 8),), extras=(np.array([2], _I),), same_scale=True),
        Probe("Unsqueeze", extras=(np.array([0], _I),), same_scale=True),
        Probe("Transpose", attributes={"perm": [0, 2, 3, 1]}, same_scale=True),
        Probe("Slice", extras=(np.array([0], _I), np.array([4], _I), np.array([2], _I)), same_scale=True),
        Probe("Split", attributes={"axis": 1, "num_outputs": 2}, outputs=2, same_scale=True),
        Probe("Gather", extras=(np.array([0, 2], _I),), attributes={"axis": 1}, same_scale=True),
        Probe("GatherElements", ((1, 4),), extras=(np.array([[0, 2]], _I),), attributes={"axis": 1}, same_scale=True),
        Probe("GatherND", ((1, 4),), extras=(np.array([[0, 2]], _I),), same_scale=True),
        Probe("Expand", ((1, 4, 1, 8),), extras=(np.array([1, 4, 3, 8], _I),), same_scale=True),
        Probe("Tile", extras=(np.array([1, 1, 2, 2], _I),), same_scale=True),
        Probe("Pad", extras=(np.array([0, 0, 1, 1, 0, 0, 1, 1], _I),), same_scale=True),
        Probe(
            "Resize", extras=(None, np.array([1, 1, 2, 2], np.float32)), attributes={"mode": "nearest"}, same_scale=True
        ),
        Probe("DepthToSpace", attributes={"blocksize": 2}, same_scale=True),
        Probe("SpaceToDepth", attributes={"blocksize": 2}, same_scale=True),
        Probe("BatchNormalization", extras=tuple(np.ones(4, np.float32) for _ in range(4))),
        Probe("InstanceNormalization", extras=tuple(np.ones(4, np.float32) for _ in range(2))),
        Probe("LayerNormalization", ((1, 4, 16),), extras=tuple(np.ones(16, np.float32) for _ in range(2))),
        Probe(
            "GroupNormalization", extras=tuple(np.ones(4, np.float32) for _ in range(2)), attributes={"num_groups": 2}
        ),
        Probe("LRN", attributes={"size": 3}),
        Probe("Einsum", ((4, 8), (8, 6)), attributes={"equation": "ij,jk->ik"}),
        Probe("CumSum", extras=(np.array(1, _I),)),
        Probe("LSTM", ((3, 1, 8),), weights=((1, 16, 8), (1, 16, 4)), attributes={"hidden_size": 4}),
        Probe("GRU", ((3, 1, 8),), weights=((1, 12, 8), (1, 12, 4)), attributes={"hidden_size": 4}),
        Probe("RNN", ((3, 1, 8),), weights=((1, 4, 8), (1, 4, 4)), attributes={"hidden_size": 4}),
    )
}


def runs_in_int8(optimized: onnx.ModelProto) -> bool:
    """Return whether all tensors between the inputs' QuantizeLinear and the outputs' DequantizeLinear are integers."""
    graph_inputs = {i.name for i in optimized.graph.input}
    graph_outputs = {o.name for o in optimized.graph.output}
    quantizers = [n for n in optimized.graph.node if n.op_type == "QuantizeLinear"]
    dequantizers = [n for n in optimized.graph.node if n.op_type == "DequantizeLinear"]
    return all(n.input[0] in graph_inputs for n in quantizers) and all(
        n.output[0] in graph_outputs for n in dequantizers
    )
