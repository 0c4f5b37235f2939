"""Test that coverage is read from what ran: the rules with synthetic profiles, and the whole with a real session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from edgeq.measure.coverage import measure_coverage
from edgeq.model.convert import from_proto
from edgeq.run.session import SessionSettings
from edgeq.util.records import plain
from tests.graphs import proto


def model(tmp_path: Path) -> Path:
    """Write a Conv with Q/DQ, which runs in integers, and an Exp, which has no integer kernel."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 127, (8, 4, 3, 3), dtype=np.int8)
    scalars = {"s": np.float32(0.02), "ws": np.float32(0.01), "zp": np.uint8(128), "wz": np.int8(0)}
    body = """g (float[1, 4, 6, 6] x) => (float[1, 8, 4, 4] y) {
        [q] xq = QuantizeLinear(x, s, zp)
        [dq] xd = DequantizeLinear(xq, s, zp)
        [dw] w = DequantizeLinear(wq, ws, wz)
        [conv] c = Conv(xd, w)
        [q2] cq = QuantizeLinear(c, s, zp)
        [dq2] cd = DequantizeLinear(cq, s, zp)
        [exp] y = Exp(cd)
    }"""
    path = tmp_path / "m.onnx"
    onnx.save(proto(body, {**scalars, "wq": weight}), path)
    return path


def float_source() -> onnx.ModelProto:
    body = """g (float[1, 4, 6, 6] x) => (float[1, 8, 4, 4] y) <float[1, 8, 4, 4] c> {
        [conv] c = Conv(x, w)
        [exp] y = Exp(c)
    }"""
    return proto(body, {"w": np.zeros((8, 4, 3, 3), np.float32)})


def test_a_real_session(tmp_path: Path) -> None:
    feed = {"x": np.ones((1, 4, 6, 6), np.float32)}
    coverage = measure_coverage(
        model(tmp_path), SessionSettings(), feed, from_proto(float_source()), lambda name, op_type: f"{op_type} because"
    )
    assert coverage.int8_macs == 8 * 4 * 4 * 4 * 9
    assert coverage.float_macs == 0
    assert coverage.int8_mac_share == 1.0
    assert [(n.name, n.op_type, n.reason) for n in coverage.float_nodes] == [("exp", "Exp", "Exp because")]
    assert plain(coverage)["float_nodes"][0]["name"] == "exp"
    assert list(tmp_path.iterdir()) == [tmp_path / "m.onnx"], "the profile and the optimised graph are not left behind"


def test_an_unfused_graph_is_float(tmp_path: Path) -> None:
    feed = {"x": np.ones((1, 4, 6, 6), np.float32)}
    coverage = measure_coverage(
        model(tmp_path),
        SessionSettings(optimization="none"),
        feed,
        from_proto(float_source()),
        lambda name, op_type: "why",
    )
    assert coverage.int8_mac_share == 0.0
    assert coverage.float_macs == 8 * 4 * 4 * 4 * 9
