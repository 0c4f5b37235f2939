from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeq.model.convert import from_proto
from edgeq.model.int8_prediction import NodePrediction, predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.prepare import prepare_model
from tests import graphs

from .build import model, node, rand, small_cnn, write


def prediction(proto: onnx.ModelProto, folder: Path, backend: str = "cpu") -> dict[str, NodePrediction]:
    prepared = prepare_model(write(folder / "m.onnx", proto), folder / "w")
    return {n.name: n for n in predict_int8(prepared.model, int8_rules(backend))}


def verdicts(forecast: Mapping[str, NodePrediction]) -> dict[str, str]:
    return {name: n.verdict for name, n in forecast.items()}


def test_a_plain_network_runs_in_int8(tmp_path: Path) -> None:
    forecast = prediction(small_cnn(), tmp_path)
    assert set(verdicts(forecast).values()) == {"int8"}
    assert forecast["conv"].macs == 8 * 8 * 8 * 27
    assert "QLinearConv" in forecast["conv"].reason


def test_a_float_island_takes_what_only_passes_data_on_with_it(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("Tanh", ["a"], ["b"], name="tanh"),
        node("Transpose", ["b"], ["c"], name="transpose", perm=[0, 2, 3, 1]),
        node("MatMul", ["c", "v"], ["y"], name="product"),
    ]
    proto = model(nodes, {"x": [1, 4, 6, 6]}, weights={"w": rand(8, 4, 3, 3), "v": rand(8, 5)})
    forecast = prediction(proto, tmp_path)
    assert verdicts(forecast) == {"conv": "int8", "tanh": "float", "transpose": "float", "product": "int8"}
    assert "no int8 kernel" in forecast["tanh"].reason
    assert "input is not quantized" in forecast["transpose"].reason


def test_shape_arithmetic_is_neither(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("Shape", ["a"], ["s"], name="shape", end=1),
        node("Concat", ["s", "rest"], ["t"], name="concat", axis=0),
        node("Reshape", ["a", "t"], ["y"], name="reshape"),
    ]
    weights = {"w": rand(8, 4, 3, 3), "rest": np.array([-1])}
    forecast = prediction(model(nodes, {"x": ["N", 4, 6, 6]}, weights=weights), tmp_path)
    assert verdicts(forecast) == {"conv": "int8", "shape": "other", "concat": "other", "reshape": "int8"}


def test_float64_stays(tmp_path: Path) -> None:
    proto = model([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [2, 4]}, dtype=TensorProto.DOUBLE)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 5)), "w"))
    assert "float64" in prediction(proto, tmp_path)["m"].reason


def test_bodies_of_control_flow_stay_float(tmp_path: Path) -> None:
    def branch(weight: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{weight}_out", TensorProto.FLOAT, [2, 5])
        return helper.make_graph([node("MatMul", ["x", weight], [f"{weight}_out"])], weight, [], [out])

    op = node("If", ["c"], ["y"], name="if", then_branch=branch("w"), else_branch=branch("v"))
    proto = model([op], {"x": [2, 4]}, weights={"w": rand(4, 5), "v": rand(4, 5)})
    proto.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    forecast = prediction(proto, tmp_path)
    assert set(verdicts(forecast).values()) == {"float"}
    assert len(forecast) == 3
    assert all("control flow" in n.reason for n in forecast.values())


def test_the_backend_decides(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"w": rand(16, 6, 3, 3)}
    proto = model([node("ConvTranspose", ["x", "w"], ["y"], name="up")], {"x": [1, 16, 6, 6]}, weights=weights)
    assert prediction(proto, tmp_path, "cpu")["up"].verdict == "float"
    assert prediction(proto, tmp_path, "tensorrt")["up"].verdict == "int8"
    assert prediction(proto, tmp_path, "systolic")["up"].verdict == "float"


def test_without_types_nothing_is_promised() -> None:
    proto = model(
        [node("Relu", ["x"], ["a"], name="r"), node("Conv", ["a", "w"], ["y"], name="c")], {"x": [1, 4, 6, 6]}
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(rand(8, 4, 3, 3), "w"))
    forecast = {n.name: n for n in predict_int8(from_proto(proto), int8_rules("cpu"))}
    assert forecast["c"].verdict == "float"
    assert "'a' are not known" in forecast["c"].reason


def test_a_cast_that_reads_a_hazardous_tensor_stays_in_float() -> None:
    """A pair in front of the Cast would round the index."""
    nodes = "[cast] i = Cast <to = 7> (p) [gather] y = Gather (x, i)"
    made = graphs.model(f"g (float[4] p, float[9] x) => (int64[4] i, float[4] y) {{ {nodes} }}")
    plain, kept = (
        {node.name: (node.verdict, node.reason) for node in predict_int8(made, int8_rules("cpu"), hazards=hazards)}
        for hazards in ({}, {"p": "becomes an index"})
    )
    assert plain["cast"] == ("other", "it makes no floats")
    assert kept["cast"] == ("float", "tensor 'p' becomes an index")
