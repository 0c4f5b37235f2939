"""Build a small transformer with two channels that dominate its residual stream and that its normalizations remove."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from tests.tuning.recover.nets import Net

WIDTH, TOKENS, HIDDEN = 32, 16, 64
SHAPE = (1, TOKENS, WIDTH)


def transformer(layers: int = 2, outlier: float = 30.0) -> ir.Model:
    """Return x [1, 16, 32] → y [1, 16, 10].

    One scale for the residual stream rounds all other channels to zero. Dynamic quantization has no such scale, because
    it quantizes only the products.
    """
    net = Net()
    channels = np.ones(WIDTH)
    channels[[5, 20]] = outlier, -outlier / 2

    def linear(x: str, inputs: int, outputs: int, name: str, scale: object = 1.0) -> str:
        weight = net.random.normal(0, 1 / np.sqrt(inputs), (inputs, outputs)) * scale
        product = net.node("MatMul", [x, net.constant(f"{name}_w", weight)], f"{name}_mm")
        return net.node("Add", [product, net.constant(f"{name}_b", net.random.normal(0, 0.1, outputs))], name)

    def norm(x: str, name: str) -> str:
        gain = net.constant(f"{name}_g", net.random.uniform(0.5, 1.5, WIDTH) / np.where(channels == 1, 1, outlier / 4))
        shift = net.constant(f"{name}_s", net.random.normal(0, 0.1, WIDTH))
        net.nodes.append(onnx.helper.make_node("LayerNormalization", [x, gain, shift], [name], name=name, axis=-1))
        return name

    def gelu(x: str, name: str) -> str:
        inner = net.node("Erf", [net.node("Div", [x, net.constant(f"{name}_r", np.sqrt(2))], f"{name}_d")], f"{name}_e")
        more = net.node("Add", [inner, net.constant(f"{name}_1", 1.0)], f"{name}_a")
        return net.node("Mul", [net.node("Mul", [x, more], f"{name}_m"), net.constant(f"{name}_h", 0.5)], name)

    x = linear("x", WIDTH, WIDTH, "embed", channels)
    for i in range(layers):
        normed = norm(x, f"norm{i}a")
        q, k, v = (linear(normed, WIDTH, WIDTH, f"{part}{i}") for part in "qkv")
        scores = net.node("MatMul", [q, net.node("Transpose", [k], f"k{i}t", perm=[0, 2, 1])], f"scores{i}")
        scaled = net.node("Mul", [scores, net.constant(f"scale{i}", 1 / np.sqrt(WIDTH))], f"scaled{i}")
        context = net.node("MatMul", [net.node("Softmax", [scaled], f"softmax{i}", axis=-1), v], f"context{i}")
        x = net.node("Add", [x, linear(context, WIDTH, WIDTH, f"out{i}")], f"stream{i}a")
        hidden = gelu(linear(norm(x, f"norm{i}b"), WIDTH, HIDDEN, f"up{i}"), f"gelu{i}")
        x = net.node("Add", [x, linear(hidden, HIDDEN, WIDTH, f"down{i}")], f"stream{i}b")
    net.node("MatMul", [norm(x, "norm"), net.constant("head_w", net.random.normal(0, 0.2, (WIDTH, 10)))], "y")
    return net.model({"x": SHAPE}, ["y"])
