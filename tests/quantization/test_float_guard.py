"""Test `edgeq.quantization.quantizer`: float layers between integer tensors stay float in a session without options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.model.convert import from_proto, to_bytes, to_proto
from edgeq.quantization.float_guard import guard_float_layers
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import attributes, proto

RANDOM = np.random.default_rng(0)
LAYERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "conv": ("Conv", (1, 8, 6, 6), (4, 8, 3, 3), {"pads": [1] * 4}),
    "one-channel": ("Conv", (1, 1, 6, 6), (4, 1, 3, 3), {"pads": [1] * 4}),
    "depthwise": ("Conv", (1, 8, 6, 6), (8, 1, 3, 3), {"pads": [1] * 4, "group": 8}),
    "transposed": ("ConvTranspose", (1, 8, 6, 6), (8, 4, 3, 3), {}),
    "gemm": ("Gemm", (2, 8), (8, 4), {}),
    "gemm-b": ("Gemm", (2, 8), (4, 8), {"transB": 1}),
    "matmul": ("MatMul", (2, 3, 8), (8, 4), {}),
}


def between_integers(kind: str, *, twice: bool = False) -> onnx.ModelProto:
    """Return x → Q → DQ → layer with float weights → Q → DQ → y. `twice` adds the dequantized tensor as an output."""
    op_type, shape, weight, options = LAYERS[kind]
    sizes = ", ".join(map(str, shape))
    body = f"""g (float[{sizes}] x) => (float[] y{", float[] xd" if twice else ""})
        <float s = {{0.02}}, float s2 = {{0.1}}, uint8 z = {{128}}> {{
        [q] xq = QuantizeLinear(x, s, z)
        [dq] xd = DequantizeLinear(xq, s, z)
        [layer] f = {op_type}{attributes(options)}(xd, w)
        [q2] fq = QuantizeLinear(f, s2, z)
        [dq2] y = DequantizeLinear(fq, s2, z)
    }}"""
    model = proto(body, {"w": RANDOM.normal(size=weight).astype(np.float32)})
    return onnx.shape_inference.infer_shapes(model)


def guarded(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = from_proto(proto)
    assert guard_float_layers(model, ["layer"]) == 1
    return to_proto(model)


def float_layers(model: onnx.ModelProto, folder: Path) -> int:
    """Return the number of layers with float weights in the graph that ONNX Runtime runs by default."""
    saved = folder / "optimised.onnx"
    open_session(model.SerializeToString(), SessionSettings(save_optimized_to=saved))
    graph = onnx.load(saved).graph
    kinds = {"Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
    return sum(node.op_type in kinds for node in graph.node)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_shielded_layer_stays_float_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    model = between_integers(kind)
    feed = {"x": RANDOM.normal(size=LAYERS[kind][1]).astype(np.float32)}
    saved = SessionSettings(optimization="none")
    unshielded = open_session(model.SerializeToString(), saved).run(None, feed)[0]
    model = guarded(model)
    onnx.checker.check_model(model, full_check=True)
    assert [node.name for node in model.graph.node].count("dq") == 0, "nobody reads it any more"
    shielded = open_session(model.SerializeToString()).run(None, feed)[0]
    # A sum in another order may round to the neighbouring integer.
    assert (np.abs(shielded - unshielded) > 0.001).mean() < 0.02
    assert np.abs(shielded - unshielded).max() < 0.101
    assert float_layers(model, tmp_path) == 1


def test_why_it_is_there(tmp_path: Path) -> None:
    """Without the guard, ONNX Runtime quantizes the float layer. Once it leaves the layer alone, the guard can be
    removed.
    """
    assert float_layers(between_integers("conv"), tmp_path) == 0


def test_other_readers_keep_their_tensor() -> None:
    model = guarded(between_integers("conv", twice=True))
    assert [node.name for node in model.graph.node].count("dq") == 1
    assert guard_float_layers(from_proto(model), ["layer"]) == 0, "it is shielded already"


def test_only_named_nodes_are_touched() -> None:
    model = from_proto(between_integers("gemm"))
    original = to_bytes(model)
    assert guard_float_layers(model, ["another"]) == 0
    assert to_bytes(model) == original
