"""Build small random float graphs of every operator that becomes C, in awkward shapes: uneven pads, groups, joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]


@dataclass
class Graph:
    """Hold a graph to which nodes are added. Its names are hostile on purpose."""

    random: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)

    def constant(self, values: NDArray[np.generic]) -> str:
        name = f'c{len(self.constants)}*/ "{{'
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, inputs: list[str], shape: Shape, **attributes: object) -> str:
        name = f'{kind} {len(self.nodes)} */ #include "/etc/passwd" \\'
        output = f"t{len(self.nodes)}\n$(reboot);"
        self.nodes.append(helper.make_node(kind, inputs, [output], name, **attributes))
        self.shapes[output] = shape
        return output

    def conv(self, x: str) -> str:
        _, channels, *size = self.shapes[x]
        pick = self.random.integers
        groups = int(self.random.choice([1, 1, 1, channels, 2 if channels % 2 == 0 else 1]))
        outs = groups * int(pick(1, 4)) if groups > 1 else int(pick(1, 22))
        square = pick(3) > 0
        kernel = [int(pick(1, 4))] * 2 if square else [int(pick(1, 4)) for _ in range(2)]
        strides = [int(pick(1, 3))] * 2 if square else [int(pick(1, 3)) for _ in range(2)]
        dilations = [1, 1] if square else [int(pick(1, 3)) for _ in range(2)]
        pads = [int(pick(0, 2))] * 4 if square else [int(pick(0, 3)) for _ in range(4)]
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        out = [(size[i] + pads[i] + pads[i + 2] - spans[i]) // strides[i] + 1 for i in range(2)]
        if min(out) < 1 or any(size[i] + pads[i] + pads[i + 2] < spans[i] for i in range(2)):
            return x
        # channels of different size give tiles with different scales
        scale = self.random.uniform(0.05, 2, (outs, 1, 1, 1))
        weights = (self.random.normal(0, 0.3, (outs, channels // groups, *kernel)) * scale).astype(np.float32)
        inputs = [x, self.constant(weights)]
        if pick(2):
            inputs.append(self.constant(self.random.normal(0, 0.3, outs).astype(np.float32)))
        y = self.node(
            "Conv", inputs, (1, outs, *out), group=groups, strides=strides, dilations=dilations, pads=pads,
            kernel_shape=kernel,
        )  # fmt: skip
        return self.activation(y) if pick(3) else y

    def activation(self, x: str) -> str:
        if self.random.integers(3) == 0:
            limits = [self.constant(np.float32(0)), self.constant(np.float32(self.random.uniform(0.2, 2)))]
            return self.node("Clip", [x, *limits], self.shapes[x])
        return self.node("Relu", [x], self.shapes[x])

    def pool(self, x: str) -> str:
        _, channels, *size = self.shapes[x]
        k, stride, pad = (int(n) for n in self.random.integers([2, 1, 0], [4, 3, 2]))
        out = [(extent + 2 * pad - k) // stride + 1 for extent in size]
        if min(out) < 1:
            return x
        kind = str(self.random.choice(["MaxPool", "MaxPool", "AveragePool"]))
        options = {"count_include_pad": 1} if kind == "AveragePool" else {}
        shape = (1, channels, *out)
        return self.node(kind, [x], shape, kernel_shape=[k, k], strides=[stride] * 2, pads=[pad] * 4, **options)

    def add(self, x: str, candidates: list[str]) -> str:
        fits = [name for name in candidates if self.shapes[name] == self.shapes[x]]
        y = self.node("Add", [x, str(self.random.choice(fits))], self.shapes[x])
        return self.activation(y) if self.random.integers(2) else y

    def join(self, x: str, candidates: list[str]) -> str:
        fits = [n for n in candidates if len(self.shapes[n]) == 4 and self.shapes[n][2:] == self.shapes[x][2:]]
        partner = str(self.random.choice(fits))
        channels = self.shapes[x][1] + self.shapes[partner][1]
        return self.node("Concat", [x, partner], (1, channels, *self.shapes[x][2:]), axis=1)

    def move(self, x: str) -> str:
        _, channels, rows, cols = self.shapes[x]
        kind = int(self.random.integers(3))
        if kind == 0:
            return self.node("Transpose", [x], (1, cols, channels, rows), perm=[0, 3, 1, 2])
        if kind == 1 and rows > 1:
            ends = [self.constant(np.int64([n])) for n in (1, rows, 2)]
            return self.node("Slice", [x, *ends], (1, channels, rows - 1, cols))
        shape = self.constant(np.int64([1, channels, cols, rows]))
        return self.node("Reshape", [x, shape], (1, channels, cols, rows))

    def dense(self, x: str) -> str:
        """Add a product of the flattened tensor, or of each channel's pixels as one row."""
        shape = self.shapes[x]
        outs = int(self.random.integers(1, 12))
        if len(shape) == 4 and self.random.integers(2):
            depth = int(np.prod(shape[2:]))
            flat = self.node("Reshape", [x, self.constant(np.int64([1, shape[1], depth]))], (1, shape[1], depth))
            y_shape: Shape = (1, shape[1], outs)
        else:
            depth = int(np.prod(shape[1:]))
            flat = self.node("Flatten", [x], (1, depth)) if len(shape) != 2 else x
            y_shape = (1, outs)
        weights = self.constant(self.random.normal(0, depth**-0.5, (depth, outs)).astype(np.float32))
        return self.node("MatMul", [flat, weights], y_shape)


def random_model(seed: int, path: Path) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    """Write the random model of `seed` to `path`. Return the path and four samples of its input."""
    graph = Graph(np.random.default_rng(seed))
    random = graph.random
    shape = (1, int(random.integers(1, 7)), int(random.integers(5, 12)), int(random.integers(5, 12)))
    graph.shapes["x"] = shape
    names = ["x"]
    x = graph.conv("x")
    for _ in range(int(random.integers(2, 8))):
        steps = [graph.conv, graph.conv, graph.pool, graph.move]
        kind = int(random.integers(len(steps) + 2))
        earlier = [name for name in names if name != "x"]
        source = x
        if kind < len(steps):
            x = steps[kind](x)
        elif x in earlier:
            x = (graph.add if kind == len(steps) else graph.join)(x, earlier)
        if x != source:
            names.append(x)
    outputs = [x] if random.integers(3) else [graph.dense(x), x]
    if random.integers(2):
        outputs = [graph.dense(x)]
    if not any(node.op_type in ("Conv", "MatMul") for node in graph.nodes):
        outputs = [graph.dense(x)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, graph.shapes[name]) for name in outputs]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    onnx_graph = helper.make_graph(graph.nodes, "g", inputs, values, graph.constants)
    onnx.save(helper.make_model(onnx_graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path, {"x": random.normal(0, 1, (4, *shape[1:])).astype(np.float32)}
