"""Small models for the tests, and a way to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Sequence[str] = ("y",),
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    dtype: int = FLOAT,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of `nodes`; outputs have no declared shape, as many exporters write them."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, dtype, list(shape)) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), list(outputs), **attributes)


def write(path: Path, proto: onnx.ModelProto) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


def rand(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: list[Any] = session.run(None, dict(feeds))
    return result


def small_cnn(**kwargs: Any) -> onnx.ModelProto:
    """Conv → BatchNormalization → Relu → GlobalAveragePool → Flatten → Gemm, batch symbolic."""
    weights = {
        "w": rand(8, 3, 3, 3),
        "scale": np.abs(rand(8, seed=1)) + 0.5,
        "shift": rand(8, seed=2),
        "mean": rand(8, seed=3),
        "var": np.abs(rand(8, seed=4)) + 0.1,
        "fc": rand(8, 5, seed=5),
        "fcb": rand(5, seed=6),
    }
    nodes = [
        node("Conv", ["x", "w"], ["conv_out"], name="conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["conv_out", "scale", "shift", "mean", "var"], ["bn_out"], name="bn"),
        node("Relu", ["bn_out"], ["relu_out"], name="relu"),
        node("GlobalAveragePool", ["relu_out"], ["pool_out"], name="pool"),
        node("Flatten", ["pool_out"], ["flat_out"], name="flat"),
        node("Gemm", ["flat_out", "fc", "fcb"], ["y"], name="gemm"),
    ]
    return model(nodes, {"x": ["N", 3, 8, 8]}, weights=weights, **kwargs)
