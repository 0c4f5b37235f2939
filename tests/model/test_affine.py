"""Test products and sums with constants after a layer: folded if possible, else left as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeq.model.affine import fold_affine

from .build import model, node, rand, run, write

LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = {
    "Conv": ((2, 4, 6, 6), (8, 4, 3, 3), {}, 8),
    "ConvTranspose": ((2, 4, 6, 6), (4, 4, 3, 3), {"group": 2}, 8),
    "Gemm": ((2, 4), (8, 4), {"transB": 1, "alpha": 0.5, "beta": 2.0}, 8),
}


def network(op_type: str, steps: list[tuple[str, bool, Any]], *, bias: bool = True) -> onnx.ModelProto:
    """Return a layer followed by steps (operator, whether the constant comes first, constant)."""
    _, shape, attributes, channels = LAYERS[op_type]
    weights: dict[str, Any] = {"w": rand(*shape), **({"b": rand(channels, seed=1)} if bias else {})}
    nodes = [node(op_type, ["x", *weights], ["t0"], name="layer", **attributes)]
    for number, (step, first, constant) in enumerate(steps):
        weights[f"c{number}"] = np.asarray(constant, np.float32)
        inputs = [f"t{number}", f"c{number}"]
        nodes.append(node(step, inputs[::-1] if first else inputs, [f"t{number + 1}"], name=f"step{number}"))
    nodes[-1].output[0] = "y"
    return model(nodes, {"x": ["N", *LAYERS[op_type][0][1:]]}, ["y"], weights)


def fold(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    graph = ir.serde.deserialize_model(proto)
    folded = fold_affine(graph)
    return ir.serde.serialize_model(graph), folded


def check_same(tmp_path: Path, before: onnx.ModelProto, after: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    feeds = {"x": rand(*shape, seed=99)}
    expected = run(write(tmp_path / "before.onnx", before), feeds)[0]
    found = run(write(tmp_path / "after.onnx", after), feeds)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@st.composite
def constants(draw: st.DrawFn, op_type: str) -> tuple[str, bool, Any]:
    step = draw(st.sampled_from(["Mul", "Add", "Sub", "Div"]))
    channels = LAYERS[op_type][3]
    values = rand(channels, seed=draw(st.integers(0, 9))) + np.float32(3)
    shape = [-1] if op_type == "Gemm" else [1, channels, 1, 1][draw(st.integers(0, 1)) :]
    form = draw(st.sampled_from(["number", "one", "channels"]))
    constant = values[0] if form == "number" else values[:1] if form == "one" else values.reshape(shape)
    return step, draw(st.booleans()) and step != "Div", constant


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), op_type=st.sampled_from(sorted(LAYERS)), bias=st.booleans())
def test_chains_fold_into_the_layer(tmp_path: Path, data: st.DataObject, op_type: str, bias: bool) -> None:
    steps = data.draw(st.lists(constants(op_type), min_size=1, max_size=4))
    proto = network(op_type, steps, bias=bias)
    after, folded = fold(proto)
    assert folded == len(steps)
    assert [(n.name, n.output[0]) for n in after.graph.node] == [("layer", "y")]
    check_same(tmp_path, proto, after, LAYERS[op_type][0])


@pytest.mark.parametrize(
    ("op_type", "step"),
    [
        ("Conv", ("Mul", False, np.ones((6, 1)))),
        ("Conv", ("Add", False, np.ones((1, 1, 8, 1, 1)))),
        ("Conv", ("Mul", False, 0.0)),
        ("Conv", ("Div", False, 0.0)),
        ("Conv", ("Div", True, 2.0)),
        ("Conv", ("Mul", False, np.inf)),
        ("Gemm", ("Add", False, np.ones((2, 1)))),
    ],
)
def test_steps_without_an_affine_form_stay(op_type: str, step: tuple[str, bool, Any]) -> None:
    after, folded = fold(network(op_type, [step]))
    assert folded == 0
    assert [n.op_type for n in after.graph.node] == [op_type, step[0]]


def test_a_result_that_is_read_elsewhere_stays() -> None:
    proto = network("Conv", [("Mul", False, 2.0)])
    proto.graph.node.append(node("Relu", ["t0"], ["z"], name="other"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    assert fold(proto)[1] == 0
