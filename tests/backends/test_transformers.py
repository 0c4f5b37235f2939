"""Test static quantization of transformers: products of weights in int8, everything between them in float."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeq.run.session import open_session
from tests.graphs import proto

from .build import Bench, bench, random

TOKENS, WIDTH, HEADS, DEPTH = 12, 32, 4, 4
NORM = "{y} = LayerNormalization ({x}, g, b)"
WRITTEN_OUT = """
    {y}_m = ReduceMean<axes = [-1]> ({x})  {y}_c = Sub ({x}, {y}_m)  {y}_s = Pow ({y}_c, two)
    {y}_v = ReduceMean<axes = [-1]> ({y}_s)  {y}_e = Add ({y}_v, tiny)  {y}_r = Sqrt ({y}_e)
    {y}_n = Div ({y}_c, {y}_r)  {y}_g = Mul ({y}_n, g)  {y} = Add ({y}_g, b)
"""
ATTENTION = """
    qm{i} = MatMul ({x}, wq{i})  qb{i} = Add (qm{i}, bias)  qr{i} = Reshape (qb{i}, heads)
    q{i} = Transpose<perm = [0, 2, 1, 3]> (qr{i})
    km{i} = MatMul ({x}, wk{i})  kr{i} = Reshape (km{i}, heads)  k{i} = Transpose<perm = [0, 2, 3, 1]> (kr{i})
    vm{i} = MatMul ({x}, wv{i})  vr{i} = Reshape (vm{i}, heads)  v{i} = Transpose<perm = [0, 2, 1, 3]> (vr{i})
    s{i} = MatMul (q{i}, k{i})  d{i} = Div (s{i}, root)  p{i} = Softmax<axis = -1> (d{i})  c{i} = MatMul (p{i}, v{i})
    ct{i} = Transpose<perm = [0, 2, 1, 3]> (c{i})  cr{i} = Reshape (ct{i}, rows)
    om{i} = MatMul (cr{i}, wo{i})  o{i} = Add (om{i}, bias)
"""
FEED_FORWARD = """
    um{i} = MatMul ({x}, wu{i})  u{i} = Add (um{i}, wide)
    e{i} = Div (u{i}, two_root)  f{i} = Erf (e{i})  a{i} = Add (f{i}, one)
    m{i} = Mul (u{i}, a{i})  h{i} = Mul (m{i}, half)
    lm{i} = MatMul (h{i}, wl{i})  l{i} = Add (lm{i}, bias)
"""


def transformer(folder: Path, norm: str, *, first: bool, batch: str) -> Bench:
    """Return an encoder whose residual stream has two channels far larger than the others, as trained ones have.

    Args:
        first: True if norms come before the layers, False if they come after the sums.
        batch: the batch size, or a name for it. With a number, onnxruntime fuses products and sums into one operator.
    """
    nodes = ["t = Transpose<perm = [0, 2, 1]> (x)"]
    nodes += ["x0 = Add (t, places)"] if first else ["placed = Add (t, places)", norm.format(x="placed", y="x0")]
    made = np.random.default_rng(5)
    weights: dict[str, object] = {
        "places": random(TOKENS, WIDTH) * np.where(np.arange(WIDTH) % 13 == 3, 60, 0.5).astype(np.float32),
        "g": made.lognormal(0, 0.5, WIDTH).astype(np.float32),
        "b": random(WIDTH) / 5,
        "bias": random(WIDTH) / 10,
        "wide": random(4 * WIDTH) / 10,
        "heads": np.array([0, TOKENS, HEADS, WIDTH // HEADS]),
        "rows": np.array([0, TOKENS, WIDTH]),
        "root": np.float32(np.sqrt(WIDTH // HEADS)),
        "two_root": np.float32(np.sqrt(2)),
        "half": np.float32(0.5),
        "one": np.float32(1),
        "two": np.float32(2),
        "tiny": np.float32(1e-6),
    }
    for i in range(DEPTH):
        x = f"x{2 * i}"
        inner, attended = (f"y{2 * i}", f"x{2 * i + 1}") if first else (x, f"z{2 * i}")
        middle = f"x{2 * i + 1}"
        outer, fed = (f"y{2 * i + 1}", f"x{2 * i + 2}") if first else (middle, f"z{2 * i + 1}")
        nodes += [norm.format(x=x, y=inner)] if first else []
        nodes += [ATTENTION.format(i=i, x=inner), f"{attended} = Add ({x}, o{i})"]
        nodes += [norm.format(x=middle, y=outer)] if first else [norm.format(x=attended, y=middle)]
        nodes += [FEED_FORWARD.format(i=i, x=outer), f"{fed} = Add ({middle}, l{i})"]
        nodes += [] if first else [norm.format(x=fed, y=f"x{2 * i + 2}")]
        for name in ("wq", "wk", "wv", "wo"):
            weights[f"{name}{i}"] = made.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        weights[f"wu{i}"] = made.normal(0, WIDTH**-0.5, (WIDTH, 4 * WIDTH)).astype(np.float32)
        weights[f"wl{i}"] = made.normal(0, (4 * WIDTH) ** -0.5, (4 * WIDTH, WIDTH)).astype(np.float32)
    nodes += [norm.format(x=f"x{2 * DEPTH}", y="y")]
    body = f"g (float[{batch}, {WIDTH}, {TOKENS}] x) => (float[{batch}, {TOKENS}, {WIDTH}] y) {{ {' '.join(nodes)} }}"
    return bench(folder, proto(body, weights), random(16, WIDTH, TOKENS, seed=3))


@pytest.mark.usefixtures("only_exact_kernels")
@pytest.mark.parametrize("norm", [NORM, WRITTEN_OUT], ids=["norm", "written-out"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("batch", ["1", "N"])
def test_products_alone_are_in_int8(tmp_path: Path, norm: str, first: bool, batch: str) -> None:
    made = transformer(tmp_path, norm, first=first, batch=batch)
    artifact = made.build()
    assert made.sqnr(artifact) > 25
    file = tmp_path / "optimized.onnx"
    open_session(artifact.model, replace(artifact.settings(), save_optimized_to=file))
    ran = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert ran["MatMulIntegerToFloat"] + ran["QGemm"] == 6 * DEPTH
    assert 4 * DEPTH <= ran["QuantizeLinear"] <= 6 * DEPTH
    assert ran["Softmax"] == ran["Gelu"] + ran["BiasGelu"] == DEPTH
    assert not ran["DequantizeLinear"]
    assert not any(name.startswith("QLinear") for name in ran)
