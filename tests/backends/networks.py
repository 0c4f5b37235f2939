"""Build small networks with random weights, and run them in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import attributes, proto

Arrays = Mapping[str, np.ndarray]
HIDDEN = 8


def model_of(nodes: str, inputs: str, weights: Arrays, outputs: Sequence[str] = ("y",)) -> onnx.ModelProto:
    """Return a model of opset 17 from nodes and inputs in ONNX's text form. Its outputs are float32."""
    outputs_text = ", ".join(f"float[] {name}" for name in outputs)
    return onnx.shape_inference.infer_shapes(proto(f"network ({inputs}) => ({outputs_text}) {{ {nodes} }}", weights))


def recurrent(
    kind: str = "GRU", *, hidden: int = HIDDEN, width: int = 6, outputs: Sequence[str] = ("y", "y_h"), **options: Any
) -> onnx.ModelProto:
    """Return x [steps, batch, width] → y [steps, directions, batch, hidden], y_h; `initial=True` adds an input h0."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    initial = options.pop("initial", False)
    lengths = options.pop("lengths", False)
    directions = 2 if options.get("direction") == "bidirectional" else 1
    random = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    weights = {
        "w": normal(directions, gates * hidden, width),
        "r": normal(directions, gates * hidden, hidden),
        "b": normal(directions, 2 * gates * hidden),
    }
    inputs = f"float[T, B, {width}] x"
    names = ["x", "w", "r", "b"]
    if lengths:
        weights["lengths"] = np.array([2, 1], np.int32)
        names.append("lengths")
    if initial:
        inputs += f", float[{directions}, B, {hidden}] h0"
        names += [""] * (5 - len(names)) + ["h0"]
    outputs_text, inputs_text = (", ".join(name or '""' for name in group) for group in (outputs, names))
    node = f"[layer] {outputs_text} = {kind}{attributes({'hidden_size': hidden, **options})}({inputs_text})"
    return model_of(node, inputs, weights, [name for name in outputs if name])


def run(model: onnx.ModelProto | Path, feed: Arrays, *, optimization: str = "all") -> dict[str, np.ndarray]:
    source = model if isinstance(model, Path) else model.SerializeToString()
    session = open_session(source, SessionSettings(optimization=optimization))  # type: ignore[arg-type]
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def sqnr_db(exact: np.ndarray, answer: np.ndarray) -> float:
    return float(
        10 * np.log10((exact.astype(float) ** 2).sum() / max(1e-30, ((exact - answer).astype(float) ** 2).sum()))
    )


def prepared(model: onnx.ModelProto, folder: Path) -> PreparedModel:
    path = folder / "source.onnx"
    onnx.save(model, path)
    return prepare_model(path, folder / "work")


def operators(model: onnx.ModelProto | Path) -> list[str]:
    loaded = onnx.load(model) if isinstance(model, Path) else model
    return [node.op_type for node in loaded.graph.node]
