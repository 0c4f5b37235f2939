"""Define small models with the shapes that matter to a quantizer, and build an artifact from a model in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from edgeq.backends.base import Artifact
from edgeq.backends.cpu import CpuBackend
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range, scheme_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.measure.coverage import Coverage, measure_coverage
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.session import SessionSettings, open_session
from edgeq.scheme import Scheme
from tests.graphs import proto

ROWS = 4
Arrays = np.ndarray[Any, np.dtype[np.float32]]


def random(*shape: int, seed: int = 0) -> Arrays:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model(nodes: str, weights: dict[str, Any], *, opset: int = 17) -> onnx.ModelProto:
    """Return a model from `x` [1, 8, 8, 8] to `y` [1, 5]."""
    return proto(f"test (float[1, 8, 8, 8] x) => (float[1, 5] y) {{ {nodes} }}", weights, opset=opset)


def stacked() -> onnx.ModelProto:
    """Return a model of a convolution and a MatMul whose weights are one matrix for each channel."""
    nodes = """
        [conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)
        [matmul] p = MatMul(c, m)
        [sum] y = ReduceSum<keepdims = 0>(p, axes)
    """
    weights = {"w": random(8, 8, 3, 3), "m": random(8, 8, 5, seed=1), "axes": np.array([1, 2])}
    return model(nodes, weights)


def residual(opset: int = 17, width: int = 8) -> onnx.ModelProto:
    """Return a model of three convolutions and a Gemm. The middle convolution is depthwise, inside a skip connection.

    The output channels of `first` differ in size by three orders of magnitude, so that per-channel scales matter.
    """
    nodes = f"""
        [first] c1 = Conv<pads = [1, 1, 1, 1]>(x, w1)
        [relu] r1 = Relu(c1)
        [depthwise] c2 = Conv<group = {width}, pads = [1, 1, 1, 1]>(r1, w2)
        [add] a = Add(r1, c2)
        [last] c3 = Conv<pads = [1, 1, 1, 1]>(a, w3)
        [pool] p = GlobalAveragePool(c3)
        [flatten] f = Flatten(p)
        [fc] y = Gemm<transB = 1>(f, w4, b4)
    """
    sizes = np.logspace(0, -3, width, dtype=np.float32).reshape(width, 1, 1, 1)
    weights = {
        "w1": random(width, 8, 3, 3, seed=1) * sizes,
        "w2": random(width, 1, 3, 3, seed=2),
        "w3": random(width, width, 3, 3, seed=3),
        "w4": random(5, width, seed=4),
        "b4": random(5, seed=5),
    }
    return model(nodes, weights, opset=opset)


def mixed(width: int = 8) -> onnx.ModelProto:
    """Return a model of a Conv, a MatMul and a Gemm, which need different weight types in dynamic quantization."""
    nodes = """
        [conv] c = Conv(x, w1)
        [pool] p = GlobalAveragePool(c)
        [flatten] f = Flatten(p)
        [matmul] m = MatMul(f, w2)
        [relu] r = Relu(m)
        [fc] y = Gemm<transB = 1>(r, w3, b3)
    """
    weights = {"w1": random(width, 8, 3, 3, seed=1), "w2": random(width, 6, seed=2), "w3": random(5, 6, seed=3)}
    return model(nodes, {**weights, "b3": random(5, seed=4)})


@dataclass(frozen=True)
class Bench:
    """Hold a prepared model with its samples and ranges, to build artifacts from."""

    prepared: PreparedModel
    samples: Samples
    folder: Path

    def ranges(self, scheme: Scheme) -> dict[str, Range]:
        statistics = collect(self.prepared.model, self.samples, model_digest=self.prepared.digest)
        return scheme_ranges(statistics, scheme)

    def build(self, name: str = "int8.onnx", **scheme: Any) -> Artifact:
        full_scheme = Scheme(**scheme)
        ranges = self.ranges(full_scheme) if full_scheme.mode == "static" else {}
        return CpuBackend().build(self.prepared, ranges, full_scheme, self.folder / name)

    def coverage(self, artifact: Artifact, settings: SessionSettings | None = None) -> Coverage:
        feed = next(iter(self.samples)).inputs
        source = self.prepared.model
        return measure_coverage(
            artifact.model, settings or artifact.settings(), feed, source, lambda name, op_type: "because"
        )

    def sqnr(self, artifact: Artifact) -> float:
        """Return the SQNR in dB of the artifact's outputs against the float model's, over all samples, with its own
        settings.
        """
        expected, got = (
            np.concatenate([session.run(None, dict(sample.inputs))[0] for sample in self.samples])
            for session in (open_session(self.prepared.path), open_session(artifact.model, artifact.settings()))
        )
        return float(10 * np.log10(np.sum(expected**2) / np.sum((expected - got) ** 2)))


def bench(folder: Path, proto: onnx.ModelProto, x: Arrays | None = None) -> Bench:
    """Prepare a model with its samples: the rows of `x`, or normally distributed values of [8, 8, 8]."""
    source = folder / "model.onnx"
    source.write_bytes(proto.SerializeToString())
    np.savez(folder / "x.npz", x=random(ROWS, 8, 8, 8) if x is None else x)
    prepared = prepare_model(source, folder / "work")
    return Bench(prepared, open_samples(folder / "x.npz", prepared.signature), folder)


def weights(artifact: Artifact) -> dict[str, Arrays]:
    """Return the artifact's initializers by name."""
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(artifact.model).graph.initializer}


def quantized(artifact: Artifact, *names: str) -> list[Arrays]:
    """Return the integers of these weights. From 1.32 on, onnxruntime's quantizer renames a transposed weight."""
    held = {k.removesuffix("_quantized").removesuffix("_Transposed"): v for k, v in weights(artifact).items()
            if k.endswith("_quantized")}  # fmt: skip
    return [held[name] for name in names if name in held]


def operators(artifact: Artifact) -> list[str]:
    return [node.op_type for node in onnx.load(artifact.model).graph.node]


def write_network(folder: Path) -> None:
    """Write `net.onnx`, `calib.npz` and a labelled `val.npz` (preprocessing "key=x,label=y")."""
    (folder / "net.onnx").write_bytes(residual().SerializeToString())
    np.savez(folder / "calib.npz", x=random(4, 8, 8, 8))
    np.savez(folder / "val.npz", x=random(3, 8, 8, 8, seed=1), y=np.array([0, 1, 2]))
