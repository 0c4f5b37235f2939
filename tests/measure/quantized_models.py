"""Make a small float model, and its quantized forms as edgeq makes them for a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edgeq.backends.cpu import CpuBackend
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.data.samples import Samples, open_samples
from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.scheme import Scheme
from tests.graphs import proto

DYNAMIC: Mapping[str, str] = {"Conv": "uint8", "Gemm": "int8", "MatMul": "int8"}
SCHEMES = {
    "u8s8": Scheme(),
    "s8s8": Scheme(activation_type="int8", activation_symmetric=True),
    "u8u8-per-tensor": Scheme(weight_type="uint8", weight_symmetric=False, per_channel=False),
    "qoperator": Scheme(format="QOperator"),
    "dynamic": Scheme(mode="dynamic", dynamic_weight_types=DYNAMIC),  # type: ignore[arg-type]
}
STATIC = tuple(name for name in SCHEMES if name != "dynamic")
WEIGHTS = ("stem.weight", "depthwise.weight", "pointwise.weight", "head.weight")


@dataclass(frozen=True)
class Quantized:
    """Hold a prepared model, its quantized forms by the names of `SCHEMES`, and their inputs."""

    source: Path
    prepared: PreparedModel
    models: Mapping[str, Path]
    data: Path
    samples: Samples
    ranges: Mapping[str, Range]


def float_model(
    *,
    batch_norm: bool = False,
    scales: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """Return x [N, 3, 8, 8] → Conv, Relu → depthwise Conv, Clip → pointwise Conv → Add → mean → Gemm → logits [N, 5].

    Args:
        batch_norm: whether a BatchNormalization follows the first Conv.
        scales: factors for the output channels of weights, by the weights' names.
    """
    rng = np.random.default_rng(7)
    shapes = {
        "stem.weight": (16, 3, 3, 3),
        "stem.bias": (16,),
        "depthwise.weight": (16, 1, 3, 3),
        "depthwise.bias": (16,),
        "pointwise.weight": (16, 16, 1, 1),
        "pointwise.bias": (16,),
        "head.weight": (5, 16),
        "head.bias": (5,),
    }
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, factors in (scales or {}).items():
        weights[name] *= factors.reshape(-1, *(1,) * (weights[name].ndim - 1)).astype(np.float32)
    weights["low"], weights["high"] = np.float32(0), np.float32(2)
    norm = "[stem_norm] stem_out = BatchNormalization(stem_raw, scale, shift, mean, var)"
    body = f"""small (float[N, 3, 8, 8] x) => (float[N, 5] logits) {{
        [stem] {"stem_raw" if batch_norm else "stem_out"} = Conv<pads = [1, 1, 1, 1]>(x, "stem.weight", "stem.bias")
        {norm if batch_norm else ""}
        [stem_relu] stem_act = Relu(stem_out)
        [depthwise] dw_out = Conv<group = 16, pads = [1, 1, 1, 1]>(stem_act, "depthwise.weight", "depthwise.bias")
        [depthwise_clip] dw_act = Clip(dw_out, low, high)
        [pointwise] pw_out = Conv(dw_act, "pointwise.weight", "pointwise.bias")
        [residual] sum = Add(pw_out, stem_act)
        [pool] pooled = GlobalAveragePool(sum)
        [flatten] features = Flatten(pooled)
        [head] logits = Gemm<transB = 1>(features, "head.weight", "head.bias")
    }}"""
    if batch_norm:
        norms = {"scale": rng.uniform(0.5, 2, 16), "shift": rng.normal(size=16), "mean": rng.normal(size=16)}
        weights |= {name: value.astype(np.float32) for name, value in norms.items()}
        weights["var"] = rng.uniform(0.5, 2, 16).astype(np.float32)
    return proto(body, weights)


def quantize_all(folder: Path, model: onnx.ModelProto, names: tuple[str, ...] = tuple(SCHEMES)) -> Quantized:
    """Write `model` to `folder`, calibrate it on 8 random samples of 2 rows, and quantize it with each scheme."""
    source, data = folder / "float.onnx", folder / "data.npz"
    source.write_bytes(model.SerializeToString())
    np.savez(data, x=np.random.default_rng(3).normal(size=(16, 3, 8, 8)).astype(np.float32))
    prepared = prepare_model(source, folder / "prepared")
    samples = open_samples(data, prepared.signature)
    statistics = collect(prepared.model, samples)
    models = {}
    ranges: Mapping[str, Range] = {}
    for name in names:
        scheme = SCHEMES[name]
        ranges = derive_ranges(
            statistics, "minmax", activation_type=scheme.activation_type, symmetric=scheme.activation_symmetric
        )
        models[name] = folder / f"{name}.onnx"
        CpuBackend().build(prepared, ranges, scheme, models[name])
    return Quantized(source, prepared, models, data, samples, ranges)


def read_graph(path: Path) -> GraphIndex:
    """Return a model file as an index by names."""
    return GraphIndex(read_model(path))
