"""Hard sigmoids that are written out, in the forms that exporters give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from edgeq.model.hard_sigmoid import write_hard_sigmoids

from .build import model, node, rand, run, write

NUMBERS = {"three": [3.0], "zero": 0.0, "six": 6.0, "sixth": np.float32(1) / 6, "seven": 7.0}
CLIP = (node("Add", ["x", "three"], ["a"], name="add"), node("Clip", ["a", "zero", "six"], ["c"], name="clip"))


def written_out(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    weights: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in NUMBERS.items()}
    return model(nodes, {"x": ["N", 8], "z": ["N", 8]}, ["y"], weights)


def rewritten(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    graph = ir.serde.deserialize_model(proto)
    count = write_hard_sigmoids(graph)
    return ir.serde.serialize_model(graph), count


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([*CLIP, node("Div", ["c", "six"], ["y"])], ["HardSigmoid"]),
        ([*CLIP, node("Mul", ["sixth", "c"], ["y"])], ["HardSigmoid"]),
        ([*CLIP, node("Mul", ["x", "c"], ["m"]), node("Div", ["m", "six"], ["y"])], ["HardSigmoid", "Mul"]),
        ([*CLIP, node("Mul", ["c", "z"], ["m"]), node("Mul", ["m", "sixth"], ["y"])], ["HardSigmoid", "Mul"]),
        ([*CLIP, node("Div", ["c", "six"], ["d"]), node("Mul", ["d", "x"], ["y"])], ["HardSigmoid", "Mul"]),
    ],
)
def test_the_forms_of_exporters(tmp_path: Path, nodes: list[onnx.NodeProto], left: list[str]) -> None:
    proto = written_out(*nodes)
    after, count = rewritten(proto)
    assert (count, [n.op_type for n in after.graph.node]) == (1, left)
    assert after.graph.node[-1].output[0] == "y"
    feeds = {"x": 4 * rand(32, 8), "z": rand(32, 8, seed=1)}
    expected = run(write(tmp_path / "before.onnx", proto), feeds)[0]
    np.testing.assert_allclose(run(write(tmp_path / "after.onnx", after), feeds)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        [*CLIP, node("Div", ["c", "seven"], ["y"])],
        [*CLIP, node("Div", ["six", "c"], ["y"])],
        [*CLIP, node("Mul", ["c", "z"], ["y"])],
        [*CLIP, node("Div", ["c", "six"], ["d"]), node("Add", ["d", "c"], ["y"])],
        [*CLIP, node("Div", ["c", "six"], ["d"]), node("Add", ["d", "a"], ["y"])],
        [node("Clip", ["x", "zero", "six"], ["c"]), node("Div", ["c", "six"], ["y"])],
        [node("Add", ["x", "three"], ["a"]), node("Relu", ["a"], ["c"]), node("Div", ["c", "six"], ["y"])],
        [node("Add", ["x", "z"], ["a"]), node("Clip", ["a", "zero", "six"], ["c"]), node("Div", ["c", "six"], ["y"])],
    ],
)
def test_what_is_none_stays(nodes: list[onnx.NodeProto]) -> None:
    after, count = rewritten(written_out(*nodes))
    assert (count, [n.op_type for n in after.graph.node]) == (0, [n.op_type for n in nodes])


def test_float64_stays() -> None:
    weights = {name: np.asarray(value, np.float64) for name, value in NUMBERS.items()}
    nodes = [*CLIP, node("Div", ["c", "six"], ["y"])]
    assert rewritten(model(nodes, {"x": ["N", 8]}, ["y"], weights, dtype=onnx.TensorProto.DOUBLE))[1] == 0
