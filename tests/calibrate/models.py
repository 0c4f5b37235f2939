"""Small models and samples that the calibration tests share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.data.sample import Sample


@dataclass(frozen=True)
class ListSamples:
    """Samples from a list of input dicts; `limit` raises KeyboardInterrupt after so many, as Ctrl-C does."""

    items: Sequence[Mapping[str, np.ndarray]]
    interrupt_after: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sample]:
        for index, inputs in enumerate(self.items):
            if index == self.interrupt_after:
                raise KeyboardInterrupt
            yield Sample(f"sample-{index}", inputs)

    def digest(self) -> str:
        return f"list-{len(self.items)}-{hash(tuple(i[k].tobytes() for i in self.items for k in sorted(i))):x}"


def value(name: str, shape: Sequence[int | str | None], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Any] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(np.asarray(w), name) for name, w in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def small_cnn(path: Path, channels: int = 32, size: int | str = 12) -> Path:
    """Two convolutions with Clip and Relu, a residual Add, a Concat, pooling and a classifier; 16 | channels or not."""
    random = np.random.default_rng(7)
    weights = {
        "w1": random.normal(0, 0.3, (channels, 3, 3, 3)).astype(np.float32),
        "b1": random.normal(0, 0.3, channels).astype(np.float32),
        "w2": random.normal(0, 0.1, (channels, channels, 3, 3)).astype(np.float32),
        "w3": random.normal(0, 0.1, (2 * channels, 10)).astype(np.float32),
        "zero": np.float32(0),
        "six": np.float32(6),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["conv1"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["conv1", "zero", "six"], ["clip1"], "clip1"),
        helper.make_node("Conv", ["clip1", "w2"], ["conv2"], "conv2", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["conv2", "clip1"], ["sum"], "sum"),
        helper.make_node("Relu", ["sum"], ["relu"], "relu"),
        helper.make_node("Concat", ["relu", "clip1"], ["both"], "both", axis=1),
        helper.make_node("GlobalAveragePool", ["both"], ["pool"], "pool"),
        helper.make_node("Flatten", ["pool"], ["flat"], "flat"),
        helper.make_node("MatMul", ["flat", "w3"], ["y"], "y"),
    ]
    return write(path, nodes, [value("x", ["N", 3, size, size])], [value("y", ["N", 10])], weights)


def images(count: int, size: int = 12, seed: int = 0) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(1, 3, size, size)).astype(np.float32)} for _ in range(count)]
