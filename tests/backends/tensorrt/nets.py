"""Small networks with what matters to TensorRT's rules, prepared, with ranges as calibration saw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.backends import Artifact, backend_for
from edgeq.calibrate.collect import collect
from edgeq.calibrate.ranges import Range, derive_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.hardware.target import Target, resolve
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.scheme import Scheme

TARGET = "nvidia-t4"
CHANNELS = 16
node = helper.make_node
SAME = {"pads": [1, 1, 1, 1]}


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Any],
    *,
    shape: Sequence[int] = (1, CHANNELS, 8, 8),
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(list(nodes), "net", [x], made, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def residual() -> onnx.ModelProto:
    """stem → two layers around a skip connection → a block whose skip has a layer of its own → pool → Gemm."""
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["c0"], name="stem", **SAME),
        node("Relu", ["c0"], ["r0"], name="relu0"),
        node("Conv", ["r0", "w1"], ["c1"], name="one", **SAME),
        node("Relu", ["c1"], ["r1"], name="relu1"),
        node("Conv", ["r1", "w2"], ["c2"], name="two", **SAME),
        node("Add", ["r0", "c2"], ["a1"], name="add1"),
        node("Relu", ["a1"], ["r2"], name="relu2"),
        node("Conv", ["r2", "w3"], ["c3"], name="three", **SAME),
        node("Relu", ["c3"], ["r3"], name="relu3"),
        node("Conv", ["r3", "w4"], ["c4"], name="four", **SAME),
        node("Conv", ["r2", "w5"], ["c5"], name="shortcut", **SAME),
        node("Add", ["c4", "c5"], ["a2"], name="add2"),
        node("GlobalAveragePool", ["a2"], ["p"], name="pool"),
        node("Flatten", ["p"], ["f"], name="flatten"),
        node("Gemm", ["f", "wf", "bf"], ["y"], name="fc", transB=1),
    ]
    weights = {f"w{i}": 0.1 * random(CHANNELS, CHANNELS, 3, 3, seed=i) for i in range(6)}
    return model(nodes, {**weights, "b0": random(CHANNELS), "wf": random(5, CHANNELS), "bf": random(5)})


@dataclass(frozen=True)
class Bench:
    """A prepared model, what calibration saw of it, and one call to an artifact."""

    prepared: PreparedModel
    samples: Samples
    observed: Mapping[str, Range]
    folder: Path

    def build(self, *, target: Target | None = None, **changes: Any) -> Artifact:
        target = target or resolve(TARGET)
        scheme: Scheme = target.profile.scheme.replace(**{"method": "minmax", **changes})
        place = self.folder / f"built-{len(list(self.folder.iterdir()))}.onnx"
        return backend_for(target, self.observed).build(self.prepared, self.observed, scheme, place)


def bench(folder: Path, proto: onnx.ModelProto, *, scale: float = 1.0, rows: int = 4) -> Bench:
    source = folder / "model.onnx"
    source.write_bytes(proto.SerializeToString())
    shape = [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
    np.savez(folder / "x.npz", x=scale * random(rows, *shape[1:]))
    prepared = prepare_model(source, folder / "work")
    samples = open_samples(folder / "x.npz", prepared.signature)
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    return Bench(prepared, samples, derive_ranges(statistics, "minmax"), folder)


def pairs(artifact: Artifact) -> dict[str, list[str]]:
    """Activation between Q and DQ → what that serves."""
    listed = artifact.details["placement"]["pairs"]
    return {pair["tensor"]: pair["serves"] for pair in listed if not pair["weight"]}


def precisions(artifact: Artifact) -> dict[str, str]:
    return {n["name"]: n["precision"] for n in artifact.details["placement"]["nodes"]}


def reasons(artifact: Artifact) -> dict[str, str]:
    return {n["name"]: n["reason"] for n in artifact.details["placement"]["nodes"]}
