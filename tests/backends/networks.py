"""Small networks with random weights, and what onnxruntime makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.session import SessionSettings, open_session

Arrays = Mapping[str, np.ndarray]
HIDDEN = 8


def model_of(
    nodes: Sequence[NodeProto], inputs: Mapping[str, Sequence[Any]], outputs: Sequence[str], weights: Arrays
) -> onnx.ModelProto:
    """A float32 model, opset 17."""

    def value(name: str, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        list(nodes),
        "network",
        [value(name, shape) for name, shape in inputs.items()],
        [value(name, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def recurrent(
    kind: str = "GRU", *, hidden: int = HIDDEN, width: int = 6, outputs: Sequence[str] = ("y", "y_h"), **attributes: Any
) -> onnx.ModelProto:
    """x [steps, batch, width] → y [steps, directions, batch, hidden], y_h; `initial=True` adds an input h0."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    initial = attributes.pop("initial", False)
    lengths = attributes.pop("lengths", False)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    random = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    weights = {
        "w": normal(directions, gates * hidden, width),
        "r": normal(directions, gates * hidden, hidden),
        "b": normal(directions, 2 * gates * hidden),
    }
    inputs: dict[str, Sequence[Any]] = {"x": ["T", "B", width]}
    names = ["x", "w", "r", "b"]
    if lengths:
        weights["lengths"] = np.array([2, 1], np.int32)
        names.append("lengths")
    if initial:
        inputs["h0"] = [directions, "B", hidden]
        names += [""] * (5 - len(names)) + ["h0"]
    node = helper.make_node(kind, names, list(outputs), name="layer", hidden_size=hidden, **attributes)
    return model_of([node], inputs, [name for name in outputs if name], weights)


def run(model: onnx.ModelProto | Path, feed: Arrays, *, optimization: str = "all") -> dict[str, np.ndarray]:
    source = model if isinstance(model, Path) else model.SerializeToString()
    session = open_session(source, SessionSettings(optimization=optimization))  # type: ignore[arg-type]
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def sqnr_db(exact: np.ndarray, made: np.ndarray) -> float:
    return float(
        10 * np.log10((exact.astype(float) ** 2).sum() / max(1e-30, ((exact - made).astype(float) ** 2).sum()))
    )


def prepared(model: onnx.ModelProto, folder: Path) -> PreparedModel:
    path = folder / "source.onnx"
    onnx.save(model, path)
    return prepare_model(path, folder / "work")


def operators(model: onnx.ModelProto | Path) -> list[str]:
    loaded = onnx.load(model) if isinstance(model, Path) else model
    return [node.op_type for node in loaded.graph.node]
