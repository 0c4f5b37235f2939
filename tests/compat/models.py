"""Small models of every kind that users of the older tools bring: old and new operator sets, 16-bit floats, subgraphs,
nodes without names, weights among the inputs, quantized ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SIZE = 8
KINDS = ("plain", "half", "unnamed", "weights as inputs", "if", "loop")
MATRIX = [(kind, opset) for kind in KINDS for opset in range(9, 24)]


def classifier(path: Path, *, opset: int = 17, kind: str = "plain") -> Path:
    """Conv, BatchNormalization, Relu, MaxPool, pooling and a Gemm over [N, 3, 8, 8]; four scores."""
    random = np.random.default_rng(0)
    float_type = np.float16 if kind == "half" else np.float32
    element = TensorProto.FLOAT16 if kind == "half" else TensorProto.FLOAT
    weights = {
        "w": random.normal(0, 0.2, (8, 3, 3, 3)),
        "b": random.normal(0, 0.1, 8),
        "bn.scale": random.uniform(0.5, 1.5, 8),
        "bn.bias": random.normal(0, 0.1, 8),
        "bn.mean": random.normal(0, 0.1, 8),
        "bn.var": random.uniform(0.5, 2, 8),
        "fc": random.normal(0, 0.3, (8, 4)),
        "fc.bias": random.normal(0, 0.1, 4),
    }
    tensors = [numpy_helper.from_array(v.astype(float_type), n) for n, v in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["n"], "bn"),
        *_middle(kind, element, tensors),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["p"], ["g"], "gap"),
        helper.make_node("Flatten", ["g"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc", "fc.bias"], ["y"], "gemm"),
    ]
    if kind == "unnamed":
        for node in nodes:
            node.name = ""
    inputs = [helper.make_tensor_value_info("x", element, ["N", 3, SIZE, SIZE])]
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    if kind == "weights as inputs":
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in tensors]
        ir_version = 3 if opset < 10 else ir_version
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", element, ["N", 4])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def _middle(kind: str, element: int, tensors: list[onnx.TensorProto]) -> list[onnx.NodeProto]:
    """From n to r: a Relu, on its own or in the body of an If or a Loop."""
    out = helper.make_tensor_value_info("inner", element, ["N", 8, SIZE, SIZE])
    if kind == "if":
        tensors.append(numpy_helper.from_array(np.array(True), "always"))
        then = helper.make_graph([helper.make_node("Relu", ["n"], ["inner"], "then_relu")], "then", [], [out])
        other = helper.make_graph([helper.make_node("Neg", ["n"], ["inner"], "else_neg")], "else", [], [out])
        # Not constant for an optimiser: it comes out of a comparison with the input.
        return [
            helper.make_node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
            helper.make_node("Cast", ["top"], ["choice"], "choice", to=TensorProto.BOOL),
            helper.make_node("Or", ["choice", "always"], ["condition"], "condition"),
            helper.make_node("If", ["condition"], ["r"], "if", then_branch=then, else_branch=other),
        ]
    if kind == "loop":
        tensors.append(numpy_helper.from_array(np.array(2, np.int64), "times"))
        tensors.append(numpy_helper.from_array(np.array(True), "go"))
        before = helper.make_tensor_value_info("carried", element, ["N", 8, SIZE, SIZE])
        body = helper.make_graph(
            [
                helper.make_node("Identity", ["on"], ["on_out"], "keep_on"),
                helper.make_node("Relu", ["carried"], ["inner"], "body_relu"),
            ],
            "body",
            [
                helper.make_tensor_value_info("i", TensorProto.INT64, []),
                helper.make_tensor_value_info("on", TensorProto.BOOL, []),
                before,
            ],
            [helper.make_tensor_value_info("on_out", TensorProto.BOOL, []), out],
        )
        return [helper.make_node("Loop", ["times", "go", "n"], ["r"], "loop", body=body)]
    return [helper.make_node("Relu", ["n"], ["r"], "relu")]


def batch(index: int = 0, *, rows: int = 2, dtype: type = np.float32) -> NDArray[np.floating]:
    return np.random.default_rng(index).normal(size=(rows, 3, SIZE, SIZE)).astype(dtype)


class Reader:
    """As users write them: an object with get_next."""

    def __init__(self, count: int = 3, dtype: type = np.float32) -> None:
        self._feeds = iter([{"x": batch(index, dtype=dtype)} for index in range(count)])

    def get_next(self) -> dict[str, NDArray[np.floating]] | None:
        return next(self._feeds, None)
