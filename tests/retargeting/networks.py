"""Build quantized networks as exporters write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper

SIZE = 8
CHANNELS = 8


def random(*shape: int, seed: int = 0, scale: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


class Net:
    """Build a graph from constants by name and nodes in order."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, name: str, values: Any) -> str:
        self.constants[name] = np.asarray(values)
        return name

    def add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{op_type}_{output}", **attributes))
        return output

    def params(self, name: str, scale: Any, zero: Any) -> list[str]:
        return [self.constant(f"{name}_s", np.asarray(scale, np.float32)), self.constant(f"{name}_z", zero)]

    def pair(self, source: str, scale: float, zero: np.generic) -> str:
        """Add QuantizeLinear and DequantizeLinear."""
        scale_name, zero_name = self.params(source, scale, zero)
        self.add("QuantizeLinear", [source, scale_name, zero_name], f"{source}_q")
        return self.add("DequantizeLinear", [f"{source}_q", scale_name, zero_name], f"{source}_dq")

    def weight(self, name: str, values: np.ndarray, *, axis: int = 0, dtype: type = np.int8) -> str:
        """Add integers with one scale per channel, and their DequantizeLinear."""
        others = tuple(i for i in range(values.ndim) if i != axis)
        scale = np.abs(values).max(axis=others) / 127
        shape = [1] * values.ndim
        shape[axis] = -1
        zero = 128 if dtype == np.uint8 else 0
        integers = (np.rint(values / scale.reshape(shape)) + zero).astype(dtype)
        names = self.params(name, scale, np.full(scale.shape, zero, dtype))
        return self.add("DequantizeLinear", [self.constant(name, integers), *names], f"{name}_dq", axis=axis)

    def model(
        self,
        inputs: Mapping[str, tuple[int, Sequence[int]]] | None = None,
        outputs: Mapping[str, int] | None = None,
        opset: int = 17,
        as_nodes: bool = False,
    ) -> onnx.ModelProto:
        """Return the model. With `as_nodes`, constants are Constant nodes, as PyTorch writes them."""
        inputs = inputs or {"x": (TensorProto.FLOAT, [1, 3, SIZE, SIZE])}
        outputs = outputs or {"y": TensorProto.FLOAT}
        tensors = [numpy_helper.from_array(values, name) for name, values in self.constants.items()]
        lifted = [helper.make_node("Constant", [], [t.name], name=f"const_{t.name}", value=t) for t in tensors]
        graph = helper.make_graph(
            [*(lifted if as_nodes else []), *self.nodes],
            "quantized",
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
            [] if as_nodes else tensors,
        )
        return helper.make_model(
            graph, producer_name="exporter", opset_imports=[helper.make_opsetid("", opset)], ir_version=8
        )


def residual_s8s8() -> onnx.ModelProto:
    """Return two convolutions and an Add with a skip branch, in symmetric int8, as ONNX Runtime writes by default.

    Two nodes read the skip branch.
    """
    net = Net()
    x = net.pair("x", 0.03, np.int8(-3))
    net.add("Conv", [x, net.weight("w1", random(CHANNELS, 3, 3, 3))], "c1", pads=[1] * 4)
    c1 = net.pair("c1", 0.05, np.int8(5))
    net.add("Conv", [c1, net.weight("w2", random(CHANNELS, CHANNELS, 3, 3, seed=1))], "c2", pads=[1] * 4)
    c2 = net.pair("c2", 0.09, np.int8(0))
    net.add("Add", [c1, c2], "a")
    a = net.pair("a", 0.1, np.int8(2))
    net.add("MaxPool", [a], "p", kernel_shape=[2, 2], strides=[2, 2])
    p = net.pair("p", 0.1, np.int8(2))
    net.add("GlobalAveragePool", [p], "g")
    net.add("Flatten", [net.pair("g", 0.02, np.int8(-1))], "f")
    f = net.pair("f", 0.02, np.int8(-1))
    net.add("MatMul", [f, net.weight("m", random(CHANNELS, 4, seed=2), axis=1)], "z")
    net.nodes.append(helper.make_node("Identity", [net.pair("z", 0.02, np.int8(0))], ["y"], name="out"))
    return net.model()


def torch_qat() -> onnx.ModelProto:
    """Return a model with fake quantization as torch.onnx exports it.

    It has Constant nodes, float weights followed by Q and DQ, a Clip after activations of seven bits, a Relu that is
    not folded, and a Linear as a Transpose and a MatMul.
    """
    net = Net()
    scale, zero = net.params("x", 0.03, np.uint8(60))
    net.add("QuantizeLinear", ["x", scale, zero], "x_q")
    bounds = [net.constant("low", np.uint8(0)), net.constant("high", np.uint8(127))]
    net.add("Clip", ["x_q", *bounds], "x_clip")
    x = net.add("DequantizeLinear", ["x_clip", scale, zero], "x_dq")
    net.constant("w", random(CHANNELS, 3, 3, 3))
    names = net.params(
        "w_fake", np.abs(random(CHANNELS, 3, 3, 3)).max(axis=(1, 2, 3)) / 127, np.zeros(CHANNELS, np.int8)
    )
    net.add("QuantizeLinear", ["w", *names], "w_q", axis=0)
    w = net.add("DequantizeLinear", ["w_q", *names], "w_dq", axis=0)
    net.add("Conv", [x, w, net.constant("b", random(CHANNELS, seed=3))], "c", pads=[1] * 4)
    net.add("Relu", ["c"], "r")
    r = net.pair("r", 0.02, np.uint8(10))  # not at the lower end, so the Relu must stay
    net.add("GlobalAveragePool", [r], "g")
    net.add("Flatten", [net.pair("g", 0.02, np.uint8(0))], "f")
    f = net.pair("f", 0.02, np.uint8(0))
    m = net.weight("m", random(4, CHANNELS, seed=4))
    net.add("MatMul", [f, net.add("Transpose", [m], "m_t", perm=[1, 0])], "z")
    net.nodes.append(helper.make_node("Identity", [net.pair("z", 0.02, np.uint8(128))], ["y"], name="out"))
    return net.model(as_nodes=True)


def torch_shared() -> onnx.ModelProto:
    """Return unfused modules as torch.onnx writes them: Identity nodes share constants, and no pair follows a Relu."""
    net = Net()
    scale, zero = net.params("x", 0.03, np.int8(0))
    shared = net.add("Identity", [zero], "zero")
    net.add("QuantizeLinear", ["x", scale, shared], "x_q")
    x = net.add("DequantizeLinear", ["x_q", scale, shared], "x_dq")
    net.add("Conv", [x, net.weight("w1", random(CHANNELS, 3, 3, 3))], "c1", pads=[1] * 4)
    r = net.add("Relu", [net.pair("c1", 0.05, np.int8(0))], "r")
    net.add("Conv", [r, net.weight("w2", random(CHANNELS, CHANNELS, 3, 3, seed=1))], "c2", pads=[1] * 4)
    net.nodes.append(helper.make_node("Identity", [net.pair("c2", 0.09, np.int8(0))], ["y"], name="out"))
    return net.model(as_nodes=True)


def tflite_int8(opset: int = 13) -> onnx.ModelProto:
    """Return a model as converters of TensorFlow Lite write it.

    Its inputs and outputs are int8 in NHWC, its biases int32, and its activations asymmetric.
    """
    net = Net()
    xs, xz = net.params("x", 0.03, np.int8(-5))
    net.add("DequantizeLinear", ["x", xs, xz], "x_f")
    net.add("Transpose", ["x_f"], "t", perm=[0, 3, 1, 2])
    t = net.pair("t", 0.03, np.int8(-5))
    w = net.weight("w", random(CHANNELS, 3, 3, 3))
    units = (net.constants["w_s"] * np.float32(0.03)).astype(np.float32)
    bias = net.params("b", units, np.zeros(CHANNELS, np.int32))
    net.constant("b", np.rint(random(CHANNELS, seed=3) / units).astype(np.int32))
    b = net.add("DequantizeLinear", ["b", *bias], "b_dq", axis=0)
    net.add("Conv", [t, w, b], "c", pads=[1] * 4)
    net.add("Relu", ["c"], "r")
    r = net.pair("r", 0.02, np.int8(-128))
    net.add("Transpose", [r], "o", perm=[0, 2, 3, 1])
    net.add("QuantizeLinear", ["o", *net.params("o", 0.02, np.int8(-128))], "y")
    inputs = {"x": (TensorProto.INT8, [1, SIZE, SIZE, 3])}
    return net.model(inputs, {"y": TensorProto.INT8}, opset=opset)


def run(model: onnx.ModelProto | Path, inputs: Mapping[str, np.ndarray], *, optimized: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, dict(inputs))[0]
    return found


def example(model: onnx.ModelProto, seed: int = 9) -> dict[str, np.ndarray]:
    made = np.random.default_rng(seed)
    value = model.graph.input[0]
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    if value.type.tensor_type.elem_type == TensorProto.INT8:
        return {value.name: made.integers(-128, 128, shape).astype(np.int8)}
    return {value.name: made.normal(size=shape).astype(np.float32)}


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]
