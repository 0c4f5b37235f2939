"""Biases of int8 layers: a session with ONNX Runtime's default optimisation computes what the file says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.backends.tensorrt.nets import CHANNELS, Bench, bench, model, random

# 65504 · x_scale · w_scale, from where the optimizer's quotient overflows, is about 5 in the first layer.
BIAS = 30.0
LAYERS = {
    "Conv": ("Conv<pads = [1, 1, 1, 1]>", (CHANNELS, CHANNELS, 3, 3)),
    "depthwise": (f"Conv<group = {CHANNELS}, pads = [1, 1, 1, 1]>", (CHANNELS, 1, 3, 3)),
    "ConvTranspose": ("ConvTranspose<pads = [1, 1, 1, 1]>", (CHANNELS, CHANNELS, 3, 3)),
    "one axis": ("Conv<pads = [1, 1]>", (CHANNELS, CHANNELS, 3)),
    "Gemm": ("Gemm<transB = 1>", (CHANNELS, CHANNELS)),
}


def chain(layer: str) -> onnx.ModelProto:
    """Three layers with biases that are large beside their scales, with what may stand between them and a Q."""
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


def sqnr(net: Bench, path: Path, level: str) -> float:
    """dB against the float model, in a session as anybody opens it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    x = dict(next(iter(net.samples)).inputs)
    wanted, got = (
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, x)[0]
        for path, options in ((net.prepared.path, None), (path, options))
    )
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))


@pytest.mark.parametrize(("rest", "per_channel"), [("float16", True), ("float16", False), ("float32", True)])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_optimisation_changes_the_answer(tmp_path: Path, layer: str, rest: str, per_channel: bool) -> None:
    net = bench(tmp_path, chain(layer))
    built = net.build(rest=rest, per_channel=per_channel)
    assert all(node["precision"] == "int8" for node in built.details["placement"]["nodes"])
    written = sqnr(net, built.model, "ORT_DISABLE_ALL")
    assert written > 30
    for level in ("ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
        assert sqnr(net, built.model, level) == pytest.approx(written, abs=0.5)
