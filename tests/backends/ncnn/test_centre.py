"""Test that layers behind a Relu get half the step, wherever that changes nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.backends.ncnn.centre import centre
from edgeq.model.graph import clamp_bounds, constant_values
from tests.backends.ncnn.networks import run_onnx, sqnr_db
from tests.graphs import proto

NET = """g (float[1,4,6,6] x) => (float[1,8,6,6] y) {
    [one] h = Conv(x, w) [relu] r = Relu(h)
    [q] rq = QuantizeLinear(r, s, z) [d] rd = DequantizeLinear(rq, s, z)
    [v] vd = DequantizeLinear<axis=0>(vq, sv, zv)
    [two] y = Conv(rd, vd)
}"""
PADDED = NET.replace("Conv(rd, vd)", "Conv<pads=[1,1,1,1]>(rd, vd)").replace("[1,8,6,6] y", "[1,8,8,8] y")


def constants(**changes: Any) -> dict[str, Any]:
    """Return the constants of `NET`."""
    random = np.random.default_rng(0)
    return {
        "w": random.normal(0, 0.5, (16, 4, 1, 1)).astype(np.float32),
        "vq": random.integers(-127, 128, (8, 16, 1, 1)).astype(np.int8),
        "s": np.float32(4 / 127),
        "z": np.int8(0),
        "sv": np.full(8, 0.01, np.float32),
        "zv": np.zeros(8, np.int8),
        **changes,
    }


def model(text: str = NET, **changes: Any) -> ir.Model:
    """Return the network."""
    return ir.serde.deserialize_model(proto(text, constants(**changes)))


def test_the_step_is_half_and_the_result_more_exact() -> None:
    coarse, fine = model(), model()
    assert centre(fine) == 1
    (quantizer,) = [node for node in fine.graph if node.op_type == "QuantizeLinear"]
    assert constant_values(quantizer.inputs[1]) == pytest.approx(2 / 127)
    exact = model(NET.replace("Conv(rd, vd)", "Conv(r, vd)"))
    inputs = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 6, 6)).astype(np.float32)}
    expected, before, after = (run_onnx(m, inputs)["y"] for m in (exact, coarse, fine))
    # Half the step is 6 dB.
    assert sqnr_db(expected, after) > sqnr_db(expected, before) + 4


def test_numbers_of_the_coarse_steps_stay_the_same() -> None:
    coarse, fine = model(), model()
    centre(fine)
    weights = np.zeros((16, 4, 1, 1), np.float32)
    weights[:, 0] = 1
    # Powers of two, so that all numbers are exact.
    changes = {"w": weights, "s": np.float32(2.0**-5), "sv": np.full(8, 2.0**-6, np.float32)}
    coarse, fine = model(**changes), model(**changes)
    assert centre(fine) == 1
    x = np.zeros((1, 4, 6, 6), np.float32)
    x[0, 0] = np.arange(36).reshape(6, 6) * 2.0**-5
    np.testing.assert_allclose(run_onnx(fine, {"x": x})["y"], run_onnx(coarse, {"x": x})["y"], rtol=0, atol=1e-4)


def test_a_clip_keeps_its_upper_bound() -> None:
    clipped = model(NET.replace("Relu(h)", "Clip(h, l, u)"), l=np.float32(0), u=np.float32(3))
    assert centre(clipped) == 1
    (clip,) = [node for node in clipped.graph if node.op_type == "Clip"]
    assert clamp_bounds(clip) == (-1.5, 1.5)


@pytest.mark.parametrize(
    "text",
    [
        PADDED,
        NET.replace("Relu(h)", "Sigmoid(h)"),
        NET.replace("(float[1,8,6,6] y)", "(float[1,8,6,6] y, float[1,16,6,6] r)"),
        NET.replace("(float[1,8,6,6] y)", "(float[1,8,6,6] y, float[1,16,6,6] n)").replace(
            "[v]", "[n] n = Neg(rd) [v]"
        ),
    ],
    ids=["padding", "no Relu", "an output", "a reader in float"],
)
def test_other_layers_keep_their_steps(text: str) -> None:
    network = model(text, **({"vq": np.ones((8, 16, 1, 1), np.int8)} if text != PADDED else {}))
    before = [(node.op_type, node.name) for node in network.graph]
    assert centre(network) == 0
    assert [(node.op_type, node.name) for node in network.graph] == before
