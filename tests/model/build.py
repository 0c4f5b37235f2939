"""Build small models for the tests and run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.graphs import proto

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
    """Return a model of `nodes`. Its outputs have no declared shapes, as many exporters write them."""
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
    """Return Conv → BatchNormalization → Relu → GlobalAveragePool → Flatten → Gemm, with a free batch."""
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


WINDOW = 4
WINDOWS = """g (float[n, 3, h, w] x) => (float[] y) {
    first = Conv <pads = [1, 1, 1, 1]> (x, wa)
    second = Relu (first)
    a = Conv <pads = [1, 1, 1, 1]> (second, wb)
    s = Shape (a)
    hw = Slice (s, two, four)
    over = Mod (hw, window)
    less = Sub (window, over)
    more = Mod (less, window)
    pads = Concat <axis = 0> (six, more)
    p = Pad (a, pads)
    head = Slice (p, one, most, two)
    tail = Slice (p, zero, one, two)
    r = Concat <axis = 2> (head, tail)
    b = Conv <pads = [1, 1, 1, 1]> (r, wb)
    c = Relu (b)
    d = Slice (c, none, hw, axes)
    e = Add (d, a)
    f = Relu (e)
    y = Conv (f, wc)
}"""


def windows() -> onnx.ModelProto:
    """Return a model that works in windows, as Swin does, on images of any size.

    It pads a tensor to whole windows, puts its first row last, convolves it, cuts it back and adds the original.
    """
    counts = {"zero": [0], "one": [1], "two": [2], "four": [4], "most": [2**31 - 1], "none": [0, 0], "axes": [2, 3]}
    weights = {"wa": rand(8, 3, 3, 3), "wb": rand(8, 8, 3, 3, seed=1), "wc": rand(4, 8, 1, 1, seed=2)}
    sizes = {name: np.array(values) for name, values in counts.items()}
    return proto(WINDOWS, {**weights, **sizes, "window": np.array([WINDOW]), "six": np.zeros(6, np.int64)})
