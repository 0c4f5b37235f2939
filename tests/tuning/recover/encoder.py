"""Build a transformer layer with random weights and outlier channels, as exporters write it, and samples for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.data.sample import Sample
from edgeq.model.prepare import PreparedModel, prepare_model

WIDTH, HEADS, WIDE = 32, 4, 64


class Sentences:
    """Yield token rows with padding, the same ones each time."""

    source = "made up"

    def __init__(self, count: int = 8) -> None:
        random = np.random.default_rng(5)
        self._samples = []
        for index in range(count):
            mask = np.ones((2, 6), np.int64)
            mask[1, 4:] = 0
            x = random.normal(0, 1, (2, 6, WIDTH)).astype(np.float32)
            self._samples.append(Sample(f"s{index}", {"x": x, "mask": mask}))

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def digest(self) -> str:
        return "0" * 64


def encoder(folder: Path, *, unsqueeze_once: bool = False, pre_norm: bool = False) -> PreparedModel:
    """Return x [N, S, 32], mask [N, S] → attention and a feed-forward part → y [N, S, 32].

    Args:
        unsqueeze_once: whether one node adds both axes to the mask.
        pre_norm: whether the normalization feeds only the feed-forward part, and not also the later sum.
    """
    random = np.random.default_rng(3)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {}

    def op(op_type: str, inputs: list[str], name: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def constant(name: str, value: np.ndarray) -> str:
        weights[name] = value
        return name

    def linear(x: str, inputs: int, outputs: int, name: str) -> str:
        w = random.normal(0, 1 / np.sqrt(inputs), (inputs, outputs)).astype(np.float32)
        op("MatMul", [x, constant(f"{name}.w", w)], f"{name}.mm")
        return op("Add", [f"{name}.mm", constant(f"{name}.b", np.full(outputs, 0.1, np.float32))], name)

    def norm(x: str, name: str) -> str:
        # The channels differ very much in size. SmoothQuant is for this case.
        scale = np.geomspace(0.05, 20, WIDTH, dtype=np.float32)
        shift = np.linspace(-0.1, 0.1, WIDTH, dtype=np.float32)
        return op("LayerNormalization", [x, constant(f"{name}.g", scale), constant(f"{name}.s", shift)], name, axis=-1)

    constant("axis1", np.array([1], np.int64))
    constant("axis2", np.array([2], np.int64))
    constant("axes", np.array([1, 2], np.int64))
    if unsqueeze_once:
        op("Unsqueeze", ["mask", "axes"], "mask4")
    else:
        op("Unsqueeze", [op("Unsqueeze", ["mask", "axis1"], "mask3"), "axis2"], "mask4")
    op("Cast", ["mask4"], "maskf", to=TensorProto.FLOAT)
    op("Sub", [constant("one", np.float32(1)), "maskf"], "inverse")
    op("Mul", ["inverse", constant("low", np.float32(-10000))], "bias")
    start = norm("x", "norm0")
    constant("split", np.array([0, 0, HEADS, WIDTH // HEADS], np.int64))
    constant("join", np.array([0, 0, WIDTH], np.int64))
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        op(
            "Transpose",
            [op("Reshape", [linear(start, WIDTH, WIDTH, part), "split"], f"{part}.r")],
            f"{part}.t",
            perm=perm,
        )
    op("Div", [op("MatMul", ["q.t", "k.t"], "scores"), constant("root", np.float32(np.sqrt(WIDTH / HEADS)))], "scaled")
    op("Softmax", [op("Add", ["scaled", "bias"], "masked")], "weights", axis=-1)
    op("Transpose", [op("MatMul", ["weights", "v.t"], "context")], "context.t", perm=[0, 2, 1, 3])
    out = linear(op("Reshape", ["context.t", "join"], "context.r"), WIDTH, WIDTH, "out")
    first = op("Add", [out, start], "sum1")
    normed = norm(first, "norm1")
    hidden = op("Relu", [linear(normed, WIDTH, WIDE, "up")], "relu")
    last = op("Add", [linear(hidden, WIDE, WIDTH, "down"), first if pre_norm else normed], "sum2")
    norm(last, "y")
    graph = helper.make_graph(
        nodes,
        "encoder",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "S", WIDTH]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, ["N", "S"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "S", WIDTH])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "encoder.onnx"
    onnx.save(model, path)
    return prepare_model(path, folder / "work")
