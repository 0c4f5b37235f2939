"""Coverage is read off what ran: synthetic profiles for the rules, a real session for the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeq.graph.convert import from_proto
from edgeq.measure.coverage import measure_coverage
from edgeq.records import plain
from edgeq.session import SessionSettings


def model(tmp_path: Path) -> Path:
    """A Conv in integers, by hand-placed Q/DQ, then an Exp that no integer kernel has."""
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 127, (8, 4, 3, 3), dtype=np.int8)
    scalars = {"s": np.float32(0.02), "ws": np.float32(0.01), "zp": np.uint8(128), "wz": np.int8(0)}
    initializers = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in scalars.items()]
    initializers.append(onnx.numpy_helper.from_array(weight, "wq"))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zp"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "zp"], ["xd"], "dq"),
        helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["w"], "dw"),
        helper.make_node("Conv", ["xd", "w"], ["c"], "conv"),
        helper.make_node("QuantizeLinear", ["c", "s", "zp"], ["cq"], "q2"),
        helper.make_node("DequantizeLinear", ["cq", "s", "zp"], ["cd"], "dq2"),
        helper.make_node("Exp", ["cd"], ["y"], "exp"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 4, 4])],
        initializers,
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def float_source() -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.zeros((8, 4, 3, 3), np.float32), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], "conv"), helper.make_node("Exp", ["c"], ["y"], "exp")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 4, 4])],
        [weight],
        value_info=[helper.make_tensor_value_info("c", TensorProto.FLOAT, [1, 8, 4, 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_a_real_session(tmp_path: Path) -> None:
    feed = {"x": np.ones((1, 4, 6, 6), np.float32)}
    found = measure_coverage(
        model(tmp_path), SessionSettings(), feed, from_proto(float_source()), lambda name, op_type: f"{op_type} because"
    )
    assert found.int8_macs == 8 * 4 * 4 * 4 * 9
    assert found.float_macs == 0
    assert found.int8_mac_share == 1.0
    assert [(n.name, n.op_type, n.reason) for n in found.float_nodes] == [("exp", "Exp", "Exp because")]
    assert plain(found)["float_nodes"][0]["name"] == "exp"
    assert list(tmp_path.iterdir()) == [tmp_path / "m.onnx"], "the profile and the optimised graph are not left behind"


def test_an_unfused_graph_is_float(tmp_path: Path) -> None:
    feed = {"x": np.ones((1, 4, 6, 6), np.float32)}
    found = measure_coverage(
        model(tmp_path),
        SessionSettings(optimization="none"),
        feed,
        from_proto(float_source()),
        lambda name, op_type: "why",
    )
    assert found.int8_mac_share == 0.0
    assert found.float_macs == 8 * 4 * 4 * 4 * 9
