"""Build models of well-known shapes with random weights, so that benchmarks need no download.

The shapes are those of ResNet-50 (v1.5, with the stride in the 3×3 convolution) and MobileNetV2 (width 1.0), for images
of 224×224 and 1000 classes. Weights have He scaling (variance 2 / fan-in before a rectifier, 1 / fan-in elsewhere), and
BatchNormalization is close to the identity. So activations have about the same magnitude as in a trained network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IMAGE = 224
CLASSES = 1000


def resnet50_shaped(path: Path, seed: int = 0) -> Path:
    """Write a ResNet-50-shaped float32 model ("input" N×3×224×224 → "logits" N×1000, N symbolic) to `path`."""
    net = _Net(seed)
    x = net.conv_bn("input", 3, 64, 7, stride=2, activation="Relu")
    x = net.node("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = net.conv_bn(x, channels, width, 1, activation="Relu")
            y = net.conv_bn(y, width, width, 3, stride=stride, activation="Relu")
            y = net.conv_bn(y, width, 4 * width, 1, gamma=0.5)
            if block == 0:
                x = net.conv_bn(x, channels, 4 * width, 1, stride=stride)
            channels = 4 * width
            x = net.node("Relu", [net.node("Add", [y, x])])
    return net.finish(x, channels, path, "resnet50_shaped")


def mobilenetv2_shaped(path: Path, seed: int = 0) -> Path:
    """Write a MobileNetV2-shaped float32 model ("input" N×3×224×224 → "logits" N×1000, N symbolic) to `path`."""
    net = _Net(seed)
    x = net.conv_bn("input", 3, 32, 3, stride=2, activation="Clip")
    channels = 32
    # (expansion, output channels, repeats, stride of the first block), from table 2 of the MobileNetV2 paper.
    for expand, out, repeats, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            hidden = channels * expand
            y = net.conv_bn(x, channels, hidden, 1, activation="Clip") if expand > 1 else x
            y = net.conv_bn(y, hidden, hidden, 3, stride=stride, groups=hidden, activation="Clip")
            y = net.conv_bn(y, hidden, out, 1)
            x = net.node("Add", [x, y]) if stride == 1 and channels == out else y
            channels = out
    x = net.conv_bn(x, channels, 1280, 1, activation="Clip")
    return net.finish(x, 1280, path, "mobilenetv2_shaped")


class _Net:
    """Collect nodes and initializers. The name of every node and tensor describes its place in the network."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def node(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def weight(self, value: np.ndarray) -> str:
        name = f"weight_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def conv_bn(
        self,
        x: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: str = "",
        gamma: float = 1.0,
    ) -> str:
        fan_in = inputs // groups * kernel * kernel
        gain = 2.0 if activation else 1.0
        w = self._random.normal(0.0, np.sqrt(gain / fan_in), (outputs, inputs // groups, kernel, kernel))
        x = self.node(
            "Conv",
            [x, self.weight(w)],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )
        scale = self._random.uniform(0.8, 1.2, outputs) * gamma
        shift = self._random.normal(0.0, 0.1, outputs)
        mean = self._random.normal(0.0, 0.1, outputs)
        variance = self._random.uniform(0.8, 1.2, outputs)
        x = self.node("BatchNormalization", [x, *(self.weight(v) for v in (scale, shift, mean, variance))])
        if activation == "Clip":
            return self.node("Clip", [x, self._constant("zero", 0.0), self._constant("six", 6.0)])
        return self.node(activation, [x]) if activation else x

    def finish(self, x: str, channels: int, path: Path, name: str) -> Path:
        """Add global average pooling and the classifier, then write the file."""
        x = self.node("Flatten", [self.node("GlobalAveragePool", [x])])
        w = self.weight(self._random.normal(0.0, np.sqrt(1.0 / channels), (CLASSES, channels)))
        b = self.weight(self._random.normal(0.0, 0.01, CLASSES))
        last = helper.make_node("Gemm", [x, w, b], ["logits"], name=f"Gemm_{len(self._nodes)}", transB=1)
        graph = helper.make_graph(
            [*self._nodes, last],
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, IMAGE, IMAGE])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
            self._initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())
        return path

    def _constant(self, name: str, value: float) -> str:
        if all(i.name != name for i in self._initializers):
            self._initializers.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name
