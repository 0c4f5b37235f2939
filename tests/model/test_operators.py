from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgeq.model.convert import to_bytes
from edgeq.model.graph import (
    DATA_MOVEMENT,
    OPERATORS,
    PERMUTATIONS,
    channel_axis,
    integer_inputs,
    is_quantized_operator,
    node_input,
    operator_of,
)
from edgeq.run.session import SessionSettings, open_session
from tests.graphs import model

_NAMES = {  # ONNX's names of the inputs in the table
    "QLinearConv": {"x": 0, "x_scale": 1, "x_zero_point": 2, "w": 3, "w_scale": 4, "w_zero_point": 5, "y_scale": 6},
    "QLinearMatMul": {"a": 0, "a_scale": 1, "a_zero_point": 2, "b": 3, "b_scale": 4, "b_zero_point": 5, "y_scale": 6},
    "ConvInteger": {"x": 0, "w": 1, "x_zero_point": 2, "w_zero_point": 3},
    "MatMulInteger": {"A": 0, "B": 1, "a_zero_point": 2, "b_zero_point": 3},
    "DequantizeLinear": {"x": 0, "x_scale": 1, "x_zero_point": 2},
}


@pytest.mark.parametrize("op_type", sorted(_NAMES))
def test_places_are_those_of_the_operators_schema(op_type: str) -> None:
    schema = [i.name for i in onnx.defs.get_schema(op_type).inputs]
    assert {name: schema.index(name) for name in _NAMES[op_type]} == _NAMES[op_type]
    for place in OPERATORS[op_type].integers:
        assert "zero_point" in schema[place.zero_point]
        assert place.scale is None or "scale" in schema[place.scale]


@pytest.mark.parametrize("op_type", sorted(name for name in OPERATORS if onnx.defs.has(name)))
def test_places_exist_in_the_schema(op_type: str) -> None:
    row, schema = OPERATORS[op_type], onnx.defs.get_schema(op_type)
    places = [*row.activations, *row.weights, *([row.bias] if row.bias is not None else [])]
    assert max(places, default=0) < schema.max_input


def test_operators_that_move_data_compute_nothing() -> None:
    assert PERMUTATIONS < DATA_MOVEMENT
    assert not any(OPERATORS[name].mac_rule or OPERATORS[name].quantized for name in DATA_MOVEMENT)


@pytest.mark.parametrize("op_type", ["QGemm", "QLinearAdd", "MatMulNBits", "DynamicQuantizeLSTM", "QLinearRelu"])
def test_quantized_operators(op_type: str) -> None:
    assert is_quantized_operator(op_type)


@pytest.mark.parametrize("op_type", ["Conv", "Gemm", "LSTM", "Softmax", "Identity", "SomethingElse"])
def test_float_operators(op_type: str) -> None:
    assert not is_quantized_operator(op_type)


def test_a_concat_has_as_many_integer_inputs_as_it_has() -> None:
    text = "net (float s, uint8 z, uint8[1] a, uint8[1] b) => (uint8[2] y) "
    text += "{ y = com.microsoft.QLinearConcat <axis = 0> (s, z, a, s, z, b, s, z) }"
    (node,) = model(text).graph
    values = [node_input(node, place.value) for place in integer_inputs(node)]
    assert [value.name for value in values if value is not None] == ["a", "b"]


def test_attention_differs_by_domain() -> None:
    text = "net (float[1,2,4] x, float[4,12] w, float[12] b) => (float[1,2,4] y) "
    (ours,) = model(text + "{ y = com.microsoft.Attention <num_heads = 2> (x, w, b) }").graph
    (theirs,) = model(text + "{ y = Attention (x, x, x) }", opset=23, ir_version=10).graph
    assert operator_of(ours).weight == 1
    assert operator_of(theirs).weight is None


@pytest.mark.parametrize(
    ("node", "axis"),
    [
        ("Conv(x, w)", 0),
        ("ConvTranspose(x, w)", 1),
        ("MatMul(x, w)", -1),
        ("Gemm(x, w)", -1),
        ("Gemm <transB = 1> (x, w)", 0),
        ("DequantizeLinear <axis = 2> (x, w)", 2),
        ("QuantizeLinear(x, w)", 1),
    ],
)
def test_the_axis_of_a_scale_per_channel(node: str, axis: int) -> None:
    (made,) = model(f"net (float[A,B] x, float[C,D] w) => (float[E,F] y) {{ y = {node} }}").graph
    assert channel_axis(made) == axis


@pytest.mark.parametrize("op_type", sorted(name for name, row in OPERATORS.items() if row.elementwise))
def test_elementwise_operators_keep_the_place_of_each_element(op_type: str) -> None:
    if not onnx.defs.has(op_type):
        pytest.skip("an operator of ONNX Runtime")
    inputs = ["x", "y"] if len(OPERATORS[op_type].activations) > 1 else ["x"]
    net = model(
        f"net (float[2,3] x, float[2,3] y) => (float[2,3] z) {{ z = {op_type} ({', '.join(inputs)}) }}", opset=24
    )
    session = open_session(to_bytes(net), SessionSettings(optimization="none"))
    random = np.random.default_rng(0)
    feed = {name: random.uniform(0.5, 0.9, (2, 3)).astype(np.float32) for name in ("x", "y")}
    (plain,) = session.run(None, feed)
    (turned,) = session.run(None, {name: value[::-1, ::-1].copy() for name, value in feed.items()})
    np.testing.assert_allclose(turned, plain[::-1, ::-1], rtol=1e-5)
