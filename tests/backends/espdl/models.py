"""Define small models that together have every operator that edgeq writes for ESP-DL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from tests.backends.build import model, random
from tests.graphs import proto

HEAD = "[pool] p = GlobalAveragePool(z) [flat] f = Flatten(p) [fc] y = Gemm<transB = 1>(f, wf, bf)"


def _layers(channels: int = 8) -> dict[str, Any]:
    return {"wf": random(5, channels, seed=8), "bf": random(5, seed=9)}


def image(nodes: str, weights: Mapping[str, Any] | None = None, channels: int = 8) -> onnx.ModelProto:
    """Return a model from `x` [1, 8, 8, 8] over `z`, which `nodes` make, to `y` [1, 5]."""
    return model(f"{nodes} {HEAD}", {**_layers(channels), **(weights or {})})


def convolution(inputs: int, outputs: int, attributes: str = "", *, size: int = 3, group: int = 1) -> onnx.ModelProto:
    """Return a model of one convolution from [1, inputs, 9, 7]."""
    nodes = f"[conv] c = Conv<{attributes or 'pads = [1, 1, 1, 1]'}, group = {group}>(x, w, b) [relu] y = Relu(c)"
    weights = {"w": random(outputs, inputs // group, size, size, seed=1), "b": random(outputs, seed=2)}
    return proto(f"g (float[1, {inputs}, 9, 7] x) => (float[] y) {{ {nodes} }}", weights)


CONV = "[conv] c = Conv<pads = [1, 1, 1, 1]>(x, w)"
W = {"w": random(8, 8, 3, 3, seed=1)}
MODELS: Mapping[str, onnx.ModelProto] = {
    "conv with a step and a dilation": convolution(3, 17, "strides = [2, 1], dilations = [2, 1], pads = [1, 0, 2, 1]"),
    "conv of 16 channels": convolution(4, 32),
    "conv of 1 × 1": convolution(6, 5, "pads = [0, 0, 0, 0]", size=1),
    "depthwise": convolution(19, 19, group=19),
    "same padding": convolution(3, 4, 'strides = [2, 2], auto_pad = "SAME_UPPER"'),
    "residual": image(f"{CONV} [add] a = Add(x, c) [relu] z = Relu(a)", W),
    "difference": image(f"{CONV} [sub] z = Sub(c, x)", W),
    "product": image(f"{CONV} [gate] s = Sigmoid(c) [mul] z = Mul(c, s)", W),
    "constants": image(f"{CONV} [mul] m = Mul(c, k) [add] z = Add(m, k)", {**W, "k": random(1, 8, 1, 1, seed=3)}),
    "six": image(f"{CONV} [clip] z = Clip(c, low, high)", {**W, "low": np.float32(0), "high": np.float32(1.1)}),
    "functions": image(
        f"{CONV} [tanh] t = Tanh(c) [leaky] l = LeakyRelu<alpha = 0.1>(t) [hard] h = HardSigmoid(l)"
        "[swish] s = HardSwish(h) [elu] z = Elu(s)",
        W,
    ),
    "max pool": image(f"{CONV} [max] z = MaxPool<kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0]>(c)", W),
    "average pool": image(f"{CONV} [mean] z = AveragePool<kernel_shape = [3, 3], strides = [2, 1]>(c)", W),
    "joined": image(
        "[a] a = Conv<pads = [1, 1, 1, 1]>(x, w) [b] b = Conv(x, v) [join] z = Concat<axis = 1>(a, b)",
        {**W, "v": 3 * random(3, 8, 1, 1, seed=2)},
        channels=11,
    ),
    "padded and cut": image(
        f"{CONV} [pad] q = Pad(c, pads) [cut] z = Slice(q, start, end, axes, steps)",
        {
            **W,
            "pads": np.array([0, 2, 1, 0, 0, 1, 0, 3]),
            "start": np.array([1, -9]),
            "end": np.array([9, 1 << 40]),
            "axes": np.array([1, 3]),
            "steps": np.array([1, 2]),
        },
    ),
    "enlarged": image(
        f'{CONV} [up] z = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",'
        ' nearest_mode = "floor">(c, "", scales)',
        {**W, "scales": np.array([1, 1, 2, 3], np.float32)},
    ),
    "in blocks": image("[blocks] s = SpaceToDepth<blocksize = 2>(x) [conv] z = Conv(s, v)", {"v": random(8, 32, 1, 1)}),
    "moved": model(
        f"{CONV} [turn] t = Transpose<perm = [0, 2, 3, 1]>(c) [shape] r = Reshape(t, dims)"
        "[fc] g = MatMul(r, m) [soft] y = Softmax<axis = -1>(g)",
        {**W, "dims": np.array([1, 512]), "m": random(512, 5, seed=4)},
    ),
    "flat": model(
        f"{CONV} [flat] f = Flatten(c) [fc] g = Gemm(f, m, b) [relu] r = Relu(g) [last] y = Gemm<transB = 1>(r, n)",
        {**W, "m": random(512, 24, seed=4), "b": random(24, seed=5), "n": random(5, 24, seed=6)},
    ),
}
"""Each model with a name that says what it is for."""
