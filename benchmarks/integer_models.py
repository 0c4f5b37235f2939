"""Make small random integer models for which saturating kernels give different outputs than exact kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]


@dataclass(frozen=True)
class IntegerModel:
    """Hold a serialized model with one input, and a value for the input."""

    kind: str
    model: bytes
    inputs: dict[str, Array]


def random_model(seed: int) -> IntegerModel:
    """Return a MatMulInteger, QLinearMatMul or QLinearConv model with u8 activations and s8 weights of the full range.
    Convolutions are dense, grouped or depthwise, and may have padding, strides and dilations.
    """
    random = np.random.default_rng(seed)
    return (_matmul_integer, _qlinear_matmul, _qlinear_conv)[seed % 3](random)


def _matmul_integer(random: np.random.Generator) -> IntegerModel:
    rows, depth, columns = (int(random.integers(1, most)) for most in (20, 200, 70))
    left = random.integers(0, 256, (rows, depth)).astype(np.uint8)
    weights = {"b": _weights(random, (depth, columns)), "az": np.uint8(random.integers(0, 256)), "bz": np.int8(0)}
    node = helper.make_node("MatMulInteger", ["x", "b", "az", "bz"], ["y"])
    return _model("MatMulInteger", node, left, weights, TensorProto.INT32)


def _qlinear_matmul(random: np.random.Generator) -> IntegerModel:
    rows, depth, columns = (int(random.integers(1, most)) for most in (20, 200, 70))
    left = random.integers(0, 256, (rows, depth)).astype(np.uint8)
    weights = {
        "as": np.float32(0.02),
        "az": np.uint8(random.integers(0, 256)),
        "b": _weights(random, (depth, columns)),
        "bs": random.uniform(0.001, 0.01, columns).astype(np.float32),
        "bz": np.zeros(columns, np.int8),
        "ys": np.float32(0.02 * 0.005 * 74 * np.sqrt(depth)),
        "yz": np.uint8(128),
    }
    node = helper.make_node("QLinearMatMul", ["x", "as", "az", "b", "bs", "bz", "ys", "yz"], ["y"])
    return _model("QLinearMatMul", node, left, weights, TensorProto.UINT8)


def _qlinear_conv(random: np.random.Generator) -> IntegerModel:
    groups = int(random.choice([1, 1, 2, 8]))
    cin = groups * (1 if groups == 8 else int(random.integers(1, 17)))
    cout = groups * (1 if groups == 8 else int(random.integers(1, 17)))
    kernel, pad, stride, dilation = (int(random.integers(low, high)) for low, high in ((1, 4), (0, 2), (1, 3), (1, 3)))
    size = int(random.integers(kernel * dilation + 1, 16))
    image = random.integers(0, 256, (1, cin, size, size)).astype(np.uint8)
    depth = cin // groups * kernel * kernel
    weights = {
        "xs": np.float32(0.02),
        "xz": np.uint8(random.integers(0, 256)),
        "w": _weights(random, (cout, cin // groups, kernel, kernel)),
        "ws": random.uniform(0.001, 0.01, cout).astype(np.float32),
        "wz": np.zeros(cout, np.int8),
        "ys": np.float32(0.02 * 0.005 * 74 * np.sqrt(depth)),
        "yz": np.uint8(128),
    }
    shape: dict[str, Any] = {"pads": [pad] * 4, "strides": [stride] * 2, "dilations": [dilation] * 2, "group": groups}
    node = helper.make_node("QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], **shape)
    return _model("QLinearConv", node, image, weights, TensorProto.UINT8)


def _weights(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int8]:
    return random.integers(-127, 128, shape).astype(np.int8)


def _model(kind: str, node: onnx.NodeProto, value: Array, weights: dict[str, Any], out: int) -> IntegerModel:
    graph = helper.make_graph(
        [node],
        kind,
        [helper.make_tensor_value_info("x", TensorProto.UINT8, value.shape)],
        [helper.make_tensor_value_info("y", out, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return IntegerModel(kind, model.SerializeToString(), {"x": value})
