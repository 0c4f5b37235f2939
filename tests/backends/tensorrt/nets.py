"""Build small prepared networks with the structures that TensorRT's rules depend on, with calibrated ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.backends.base import Artifact, backend_for
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.hardware.target import Target, resolve
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.scheme import Scheme
from tests.graphs import proto

TARGET = "nvidia-t4"
CHANNELS = 16
# The optimizer's quotient overflows from 65504 · x_scale · w_scale on, which is about 5 in the first layer.
BIAS = 30.0
LAYERS = {
    "Conv": ("Conv<pads = [1, 1, 1, 1]>", (CHANNELS, CHANNELS, 3, 3)),
    "depthwise": (f"Conv<group = {CHANNELS}, pads = [1, 1, 1, 1]>", (CHANNELS, 1, 3, 3)),
    "ConvTranspose": ("ConvTranspose<pads = [1, 1, 1, 1]>", (CHANNELS, CHANNELS, 3, 3)),
    "one axis": ("Conv<pads = [1, 1]>", (CHANNELS, CHANNELS, 3)),
    "Gemm": ("Gemm<transB = 1>", (CHANNELS, CHANNELS)),
}


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model(
    nodes: str,
    weights: Mapping[str, Any],
    *,
    shape: Sequence[int] = (1, CHANNELS, 8, 8),
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model of the float input x from nodes in ONNX's text form. Its outputs are float32."""
    sizes, outputs_text = ", ".join(map(str, shape)), ", ".join(f"float[] {name}" for name in outputs)
    return proto(f"net (float[{sizes}] x) => ({outputs_text}) {{ {nodes} }}", weights, opset=opset)


def residual() -> onnx.ModelProto:
    """Return stem → two layers around a skip connection → a block whose skip has its own layer → pool → Gemm."""
    nodes = """
        [stem] c0 = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
        [relu0] r0 = Relu(c0)
        [one] c1 = Conv<pads = [1, 1, 1, 1]>(r0, w1)
        [relu1] r1 = Relu(c1)
        [two] c2 = Conv<pads = [1, 1, 1, 1]>(r1, w2)
        [add1] a1 = Add(r0, c2)
        [relu2] r2 = Relu(a1)
        [three] c3 = Conv<pads = [1, 1, 1, 1]>(r2, w3)
        [relu3] r3 = Relu(c3)
        [four] c4 = Conv<pads = [1, 1, 1, 1]>(r3, w4)
        [shortcut] c5 = Conv<pads = [1, 1, 1, 1]>(r2, w5)
        [add2] a2 = Add(c4, c5)
        [pool] p = GlobalAveragePool(a2)
        [flatten] f = Flatten(p)
        [fc] y = Gemm<transB = 1>(f, wf, bf)
    """
    weights = {f"w{i}": 0.1 * random(CHANNELS, CHANNELS, 3, 3, seed=i) for i in range(6)}
    return model(nodes, {**weights, "b0": random(CHANNELS), "wf": random(5, CHANNELS), "bf": random(5)})


def chain(layer: str) -> onnx.ModelProto:
    """Return layers whose biases are large next to their scales, with operators that may be between them and a Q."""
    call, weight = LAYERS[layer]
    nodes = f"""
        [one] c1 = {call}(x, w1, b1)
        [relu] r1 = Relu(c1)
        [two] c2 = {call}(r1, w2, b2)
        [three] c3 = {call}(c2, w3, b3)
        [clip] r3 = Clip(c3, low, high)
        [four] y = {call}(r3, w4, b4)
    """
    weights = {f"w{i}": 0.1 * random(*weight, seed=i) for i in range(1, 5)}
    biases = {f"b{i}": BIAS * np.abs(random(CHANNELS, seed=10 + i)) for i in range(1, 5)}
    bounds = {"low": np.float32(0), "high": np.float32(100)}
    return model(nodes, {**weights, **biases, **bounds}, shape=(1, CHANNELS, *[6] * (len(weight) - 2)))


@dataclass(frozen=True)
class Bench:
    """Hold a prepared model and its ranges from calibration, and build artifacts in one call."""

    prepared: PreparedModel
    samples: Samples
    observed: Mapping[str, Range]
    folder: Path

    def build(self, *, target: Target | None = None, **changes: Any) -> Artifact:
        target = target or resolve(TARGET)
        scheme: Scheme = target.profile.scheme.replace(**{"method": "minmax", **changes})
        place = self.folder / f"built-{len(list(self.folder.iterdir()))}.onnx"
        return backend_for(target, self.observed).build(self.prepared, self.observed, scheme, place)


def bench(folder: Path, net: onnx.ModelProto, *, scale: float = 1.0, rows: int = 4) -> Bench:
    source = folder / "model.onnx"
    source.write_bytes(net.SerializeToString())
    shape = [d.dim_value for d in net.graph.input[0].type.tensor_type.shape.dim]
    np.savez(folder / "x.npz", x=scale * random(rows, *shape[1:]))
    prepared = prepare_model(source, folder / "work")
    samples = open_samples(folder / "x.npz", prepared.signature)
    statistics = collect(prepared.model, samples, model_digest=prepared.digest)
    return Bench(prepared, samples, derive_ranges(statistics, "minmax"), folder)


def pairs(artifact: Artifact) -> dict[str, list[str]]:
    """Return what each Q/DQ pair of an activation serves, by tensor."""
    listed = artifact.details["placement"]["pairs"]
    return {pair["tensor"]: pair["serves"] for pair in listed if not pair["weight"]}


def precisions(artifact: Artifact) -> dict[str, str]:
    return {n["name"]: n["precision"] for n in artifact.details["placement"]["nodes"]}


def reasons(artifact: Artifact) -> dict[str, str]:
    return {n["name"]: n["reason"] for n in artifact.details["placement"]["nodes"]}
